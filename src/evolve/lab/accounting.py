"""What a model costs: parameters, cache bytes and FLOPs, counted from the model itself.

Nothing is computed from a formula: the model runs once on the ``meta`` device, where tensors have shapes
and no contents, and what it builds is counted. So a new kind of layer needs no new code here, and a
2.8-trillion-parameter model can be counted on a laptop.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from evolve.cache import Cache
from evolve.checks import require


def parameters(model: nn.Module) -> int:
    """Number of parameters; shared ones (a tied head) count once, packed ones as the weights they are."""
    packed = sum(getattr(module, "packed_parameters", 0) for module in model.modules())
    return sum(p.numel() for p in model.parameters()) + packed


def activated_parameters(model: nn.Module) -> int:
    """Number of parameters that one token is multiplied by.

    That is all but the experts it does not choose and the input embedding, of which it only looks up a row
    (unless the table is the output head as well).
    """
    idle = sum(module.idle_parameters for module in model.modules() if hasattr(module, "idle_parameters"))
    table = getattr(model, "embed_tokens", None)
    return parameters(model) - idle - (parameters(table) if table is not None else 0)


def cache_bytes(
    model: nn.Module, context: int, *, batch_size: int = 1, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes that the cache holds after ``context`` tokens, if the model runs in ``dtype``."""
    return meta_cache(model, context, batch_size, dtype).nbytes


def forward_flops(model: nn.Module, tokens: int, *, context: int = 0, batch_size: int = 1) -> int:
    """FLOPs (a multiplication and an addition are two) of reading ``tokens`` after ``context`` cached ones.

    Matrix products only, as is usual; ``tokens=1`` is one decoding step. Attention is counted as the
    written-out form computes it, masked pairs included.
    """
    require(tokens >= 1, f"tokens must be at least 1, got {tokens}")
    cache = meta_cache(model, context, batch_size, torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        _run_on_meta(model, tokens, cache, torch.bfloat16)
    return counter.get_total_flops()


def meta_cache(model: nn.Module, context: int, batch_size: int, dtype: torch.dtype) -> Cache:
    """The cache after ``context`` tokens: every tensor with its shape, none with contents."""
    require(context >= 0, f"context must not be negative, got {context}")
    cache = model.new_cache(batch_size)
    if context:
        _run_on_meta(model, context, cache, dtype)
    return cache


@torch.no_grad()
def _run_on_meta(model: nn.Module, tokens: int, cache: Cache, dtype: torch.dtype) -> Tensor:
    """One forward pass without contents; ``model`` is neither copied nor changed."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = {
        name: torch.empty_like(t, device="meta", dtype=dtype if t.is_floating_point() else t.dtype)
        for name, t in state.items()
    }
    input_ids = torch.empty(cache.batch_size, tokens, dtype=torch.int64, device="meta")
    return functional_call(model, on_meta, (input_ids,), {"cache": cache})
