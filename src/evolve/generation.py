"""Generating text, one function for every model of the series.

A model needs three things: ``model(input_ids, cache=, attention_mask=) -> logits``, ``model.new_cache(B)``
and ``model.context_length`` (the longest sequence it can take, ``None`` for no limit).
"""

import math
import numbers
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from evolve.checks import check_count, check_shape, check_token_ids, require


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | Iterable[int] | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Continue ``input_ids`` [B, T] by ``max_new_tokens`` tokens: [B, T + max_new_tokens].

    The prompt is read once; afterwards each step feeds one token and the cache. ``temperature`` 0 takes
    the most likely token; otherwise logits are divided by it, cut to the ``top_k`` largest, then to the
    smallest set whose probability reaches ``top_p`` (Holtzman et al., 2020), and sampled, repeatably when
    ``seed`` is given. A row that has met ``stop`` (one id or several) is filled up with the id it met.
    ``attention_mask`` [B, T] (bool, true = real token) marks padding, left or right.

    Raises ``ValueError`` naming the argument, before anything is computed.
    """
    _check_request(model, input_ids, max_new_tokens, attention_mask)
    _check_sampling(temperature, top_k, top_p)
    stop_ids = _stop_ids(stop, input_ids.device)
    generator = None
    if seed is not None:
        check_count("seed", seed, 0)
        require(seed < 2**63, f"seed must be below 2**63, got {seed}")
        generator = torch.Generator(input_ids.device).manual_seed(int(seed))
    if max_new_tokens == 0 or input_ids.shape[0] == 0:
        return torch.cat([input_ids, input_ids.new_zeros(input_ids.shape[0], max_new_tokens)], dim=1)

    cache = model.new_cache(input_ids.shape[0])
    logits = _last_real(model(input_ids, cache=cache, attention_mask=attention_mask), attention_mask)
    token, done = None, torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    new = []
    for step in range(max_new_tokens):
        if step:
            logits = model(token[:, None], cache=cache)[:, -1]
        sampled = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        sampled = sampled.to(input_ids.dtype)
        token = sampled if token is None else torch.where(done, token, sampled)
        new.append(token)
        done = done | torch.isin(token, stop_ids)
        if done.all():
            new += [token] * (max_new_tokens - step - 1)
            break
    return torch.cat([input_ids, torch.stack(new, dim=1)], dim=1)


def sample(
    logits: Tensor,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row from ``logits`` [B, vocab]; the arguments are those of ``generate``."""
    _check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    if top_k is not None:  # by index: equal logits must not let more than k through
        kept = logits.topk(min(top_k, logits.shape[-1]), dim=-1).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    # Shifting by the maximum changes no probability; with it, tiny temperatures give 0 and -inf, never nan.
    limits = torch.finfo(logits.dtype)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / min(max(temperature, limits.tiny), limits.max)
    if top_p is not None:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        p = ordered.softmax(dim=-1)
        outside = p.cumsum(dim=-1) - p >= top_p  # already reached before this token; never the first
        outside[..., 0] = False
        logits = logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def _last_real(logits: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The logits [B, vocab] of each row's last real token."""
    if attention_mask is None:
        return logits[:, -1]
    T = logits.shape[1]
    last = (attention_mask * torch.arange(T, device=logits.device)).argmax(dim=1)
    return logits[torch.arange(len(last), device=logits.device), last]


def _stop_ids(stop: int | Iterable[int] | None, device: torch.device) -> Tensor:
    several = isinstance(stop, Iterable) and not isinstance(stop, str | Tensor)
    ids = [] if stop is None else list(stop) if several else [stop]
    for i in ids:
        check_count("stop", i, 0)
        require(i < 2**63, f"stop must hold token ids, got {i}")
    return torch.tensor([int(i) for i in ids], dtype=torch.int64, device=device)


def _check_request(
    model: nn.Module, input_ids: Tensor, max_new_tokens: int, attention_mask: Tensor | None
) -> None:
    check_shape("input_ids", input_ids, B=None, T=None)
    B, T = input_ids.shape
    require(T >= 1, "input_ids must hold at least one token a row, got T = 0")
    check_count("max_new_tokens", max_new_tokens, 0)
    longest = T
    if attention_mask is not None:
        check_shape("attention_mask", attention_mask, B=B, T=T)
        require(
            attention_mask.dtype == torch.bool, f"attention_mask must be bool, got {attention_mask.dtype}"
        )
        require(bool(attention_mask.any(1).all()), "attention_mask must leave at least one real token a row")
        longest = int(attention_mask.sum(1).max()) if B else 0
    check_token_ids("input_ids", input_ids, model.vocab_size, attention_mask)
    limit = model.context_length
    # The last new token is returned but never read.
    require(
        limit is None or longest + max_new_tokens - 1 <= limit,
        f"max_new_tokens must be at most {limit and limit - longest + 1} (the model has {limit} positions, "
        f"the prompt {longest} tokens), got {max_new_tokens}",
    )


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    fits = number and 0 <= temperature < math.inf
    require(fits, f"temperature must be finite and >= 0, got {temperature!r}"[:200])
    if top_k is not None:
        check_count("top_k", top_k)
    require(
        top_p is None or (isinstance(top_p, numbers.Real) and 0 < top_p <= 1),
        f"top_p must lie in (0, 1], got {top_p!r}",
    )
