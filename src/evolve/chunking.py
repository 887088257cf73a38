"""The parts every chunked form shares: cutting time into chunks, the triangular solve, the walk over chunks.

A chunked form does all of a chunk's inner work as matrix products, for every chunk at once, and walks
from chunk to chunk with nothing but the state. Shapes: NT chunks of C tokens; X stands for K or V.

Two limits of every chunked form. A product with zeros above the diagonal is still a product: an infinite or
nan token reaches earlier rows of its own chunk (the loops keep it out). And float32 keeps about four digits
where the delta rule is only just stable, at β = 2 with one key repeated for thousands of tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def to_chunks(x: Tensor, C: int) -> Tensor:
    """Cut time into chunks, filled up with zeros. x: [B, T, HV, ...] -> [B, HV, NT, C, ...], NT ≥ 1.

    A token of zeros (k = 0, beta = 0, g = 0) neither decays nor writes, so a filled-up chunk, and the one
    chunk of an empty sequence, hand the state on unchanged.
    """
    B, T, HV, *X = x.shape
    NT = max(1, -(-T // C))
    x = torch.cat([x, x.new_zeros(B, NT * C - T, HV, *X)], dim=1)
    return x.transpose(1, 2).unflatten(2, (NT, C))


def from_chunks(o: Tensor, T: int) -> Tensor:
    """Undo ``to_chunks``. o: [B, HV, NT, C, V] -> [B, T, HV, V]."""
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2)


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of every two neighbouring blocks. x: [..., 2n, size, X]."""
    return x.unflatten(-3, (-1, 2)).unbind(-3)


def stack_triangle(first: Tensor, square: Tensor, second: Tensor) -> Tensor:
    """[[first, 0], [square, second]]: two finished blocks and what the later one has from the earlier."""
    size = first.shape[-1]
    return torch.cat([F.pad(first, (0, size)), torch.cat([square, second], -1)], -2)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)⁻¹ with its gradient in closed form: dA = −Xᵀ dX Xᵀ for X = (I + A)⁻¹."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, A: Tensor) -> Tensor:
        C, size = A.shape[-1], 1
        X = A.new_ones(*A.shape[:-1], 1, 1)  # blocks of one token: [..., blocks, size, size]
        while size < C:
            X_1, X_2 = pairs(X)
            blocks = A.unflatten(-1, (-1, 2 * size)).unflatten(-3, (-1, 2 * size))
            square = blocks.diagonal(dim1=-4, dim2=-2)[..., size:, :size, :].movedim(-1, -3)
            X = stack_triangle(X_1, -X_2 @ square @ X_1, X_2)
            size = 2 * size
        X = X[..., 0, :, :]
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dX: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        return (-X.mT @ dX @ X.mT).tril(-1)


def unit_lower_inverse(A: Tensor) -> Tensor:
    """The triangular solve of every delta rule: (I + strict_tril(A))⁻¹, for all chunks at once.

    Blocks of 1, 2, 4, … tokens are inverted by their halves, in matrix products only:

        [[L₁, 0], [A₂₁, L₂]]⁻¹ = [[X₁, 0], [−X₂ A₂₁ X₁, X₂]]    with X = L⁻¹

    Its entries are the factors that erasing leaves of each write, at most β for unit keys and β ≤ 2, so the
    inverse is as harmless as a substitution, and several times faster. A: [..., C, C], read below its
    diagonal only -> [..., C, C].
    """
    C = A.shape[-1]
    missing = power_of_two(C) - C
    return _UnitLowerInverse.apply(F.pad(A, (0, missing, 0, missing)))[..., :C, :C]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def walk_chunks(
    S: Tensor, U: Tensor, W: Tensor, K_out: Tensor, decay: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state from chunk to chunk: U_n − W_n S is written, S ← decay_n ⊙ S + K_outᵀ (U_n − W_n S).

    S: [B, HV, K, V]; U: [B, HV, NT, C, V]; W, K_out: [B, HV, NT, C, K]; decay: [B, HV, NT, K or 1, 1].
    Returns: S before each chunk [B, HV, NT, K, V], what was written [B, HV, NT, C, V], the last S.
    """
    heads, S = S.shape[:2], S.flatten(0, 1)
    # unbind, not indexing: the gradient of x[:, n] is a zero tensor as large as all of x, once per chunk.
    parts = [x.flatten(0, 1).unbind(1) for x in (U, W, K_out.mT)]
    decays = [None] * U.shape[2] if decay is None else decay.flatten(0, 1).unbind(1)
    before, written = [], []
    for U_n, W_n, K_n, decay_n in zip(*parts, decays):
        before.append(S)
        written.append(torch.baddbmm(U_n, W_n, S, alpha=-1))  # U_n − W_n S
        faded = S if decay_n is None else decay_n * S
        S = torch.baddbmm(faded, K_n, written[-1])  # decay_n ⊙ S + K_outᵀ (U_n − W_n S)
    return *(torch.stack(x, 1).unflatten(0, heads) for x in (before, written)), S.unflatten(0, heads)
