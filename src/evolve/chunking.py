"""The parts every chunked form shares: cutting time into chunks, the triangular solve, the walk over chunks.

A chunked form does all of a chunk's inner work as matrix products, for every chunk at once, and walks
from chunk to chunk with nothing but the state. Shapes: NT chunks of C tokens; X stands for K or V.
"""

import torch
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


def solve_unit_lower(A: Tensor, *rhs: Tensor) -> tuple[Tensor, ...]:
    """The solutions X of (I + strict_tril(A)) X = rhs, by forward substitution, for all chunks at once.

    A: [..., C, C], never read on or above its diagonal; rhs: any number of [..., C, X], all solved together.
    """
    X = torch.linalg.solve_triangular(A, torch.cat(rhs, dim=-1), upper=False, unitriangular=True)
    return X.split([b.shape[-1] for b in rhs], dim=-1)


def walk_chunks(
    S: Tensor, U: Tensor, W: Tensor, K_out: Tensor, decay: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state from chunk to chunk: U_n − W_n S is written, S ← decay_n ⊙ S + K_outᵀ (U_n − W_n S).

    S: [B, HV, K, V]; U: [B, HV, NT, C, V]; W, K_out: [B, HV, NT, C, K]; decay: [B, HV, NT, K or 1, 1].
    Returns: S before each chunk [B, HV, NT, K, V], what was written [B, HV, NT, C, V], the last S.
    """
    before, written = [], []
    # unbind, not indexing: the gradient of x[:, :, n] is a zero tensor as large as all of x, once per chunk.
    parts = [x.unbind(2) for x in (U, W, K_out.mT)]
    decays = [None] * U.shape[2] if decay is None else decay.unbind(2)
    for U_n, W_n, K_n, decay_n in zip(*parts, decays):
        before.append(S)
        written.append(U_n - W_n @ S)
        S = (S if decay_n is None else decay_n * S) + K_n @ written[-1]
    return torch.stack(before, 2), torch.stack(written, 2), S
