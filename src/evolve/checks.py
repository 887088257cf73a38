"""Checks of arguments. Every message names the argument, the rule and what was given.

Public functions check first and compute afterwards, so that bad input changes nothing.
"""

import math
import numbers

import torch
from torch import Tensor


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_tensor(name: str, x: object) -> None:
    """``x`` must be a ``torch.Tensor``."""
    require(isinstance(x, Tensor), f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_shape(name: str, x: Tensor, **sizes: int | None) -> None:
    """``x`` must be a tensor with one axis for each letter, of the size given (``None``: any size).

    ``check_shape("beta", beta, B=2, T=64, HV=4)`` raises
    ``beta must be [B, T, HV] = [2, 64, 4], got [2, 64, 8]``.
    """
    check_tensor(name, x)
    fits = x.ndim == len(sizes) and all(n is None or n == got for n, got in zip(sizes.values(), x.shape))
    letters = ", ".join(sizes)
    values = ", ".join("any" if n is None else str(n) for n in sizes.values())
    require(fits, f"{name} must be [{letters}] = [{values}], got {list(x.shape)}")


def check_float(name: str, x: Tensor) -> None:
    """``x`` must have a floating-point dtype."""
    check_tensor(name, x)
    require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")


def check_token_ids(name: str, ids: Tensor, vocab_size: int, mask: Tensor | None = None) -> None:
    """``ids`` must be [B, T] integers in [0, vocab_size); where ``mask`` is false anything is allowed."""
    check_shape(name, ids, B=None, T=None)
    require(ids.dtype in (torch.int64, torch.int32), f"{name} must be int64 or int32, got {ids.dtype}")
    if ids.is_meta:  # nothing to look at
        return
    real = ids if mask is None else ids[mask]
    if real.numel():
        low, high = int(real.min()), int(real.max())
        require(
            low >= 0 and high < vocab_size,
            f"{name} must lie in [0, {vocab_size}), got values from {low} to {high}",
        )


def check_count(name: str, n: object, least: int = 1, most: int | None = None) -> None:
    """``n`` must be an integer (not a bool) of at least ``least``, and at most ``most`` if that is given."""
    whole = isinstance(n, numbers.Integral) and not isinstance(n, bool)
    fits = whole and n >= least and (most is None or n <= most)
    limit = "" if most is None else f" and <= {most}"
    require(fits, f"{name} must be an integer >= {least}{limit}, got {n!r}"[:300])


def check_flag(name: str, x: object) -> None:
    """``x`` must be ``True`` or ``False``: in a configuration file the text "false" would count as true."""
    require(isinstance(x, bool), f"{name} must be true or false, got {x!r}"[:300])


def check_positive(name: str, x: object) -> None:
    """``x`` must be a positive, finite number."""
    fits = isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf
    require(fits, f"{name} must be positive and finite, got {x!r}")
