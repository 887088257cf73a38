"""Which token belongs to which chunk of which sequence, for a batch and for packed sequences alike.

B rows of T tokens, and N sequences packed into one row, both are sequences in one long row of tokens; a
chunk never crosses the end of one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """starts [N+1] int64: token at which each sequence starts. chunk_starts [N+1] int32: its first chunk.
    chunk_rows [NT] int32: the sequence of each chunk."""

    starts: Tensor
    chunk_starts: Tensor
    chunk_rows: Tensor

    @property
    def N(self) -> int:
        return self.starts.numel() - 1

    @property
    def NT(self) -> int:
        return self.chunk_rows.numel()


def spans_of(B: int, T: int, C: int, cu_seqlens: Tensor | None, device: torch.device) -> Spans:
    """Cut B rows of T tokens, or the sequences that ``cu_seqlens`` [N+1] packs, into chunks of C tokens.

    Without ``cu_seqlens`` nothing is read back from the device. With it the number of chunks has to be.
    """
    if cu_seqlens is None:
        NT = -(-T // C)
        n = torch.arange(B + 1, device=device)
        chunk_starts = (n * NT).to(torch.int32)
        rows = torch.arange(B * NT, device=device, dtype=torch.int32) // max(NT, 1)
        return Spans(n * T, chunk_starts, rows.to(torch.int32))
    starts = cu_seqlens.to(device=device, dtype=torch.int64)
    counts = -(-starts.diff() // C)
    chunk_starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    n = torch.arange(counts.numel(), device=device, dtype=torch.int32)
    return Spans(starts, chunk_starts, n.repeat_interleave(counts))
