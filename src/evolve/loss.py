"""The training loss of every model of the series."""

import torch.nn.functional as F
from torch import Tensor, nn

from evolve.checks import check_shape, check_token_ids, require
from evolve.norms import at_least_float32


def next_token_loss(model: nn.Module, input_ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token of ``model(input_ids)`` [B, T, vocab] against ``targets`` [B, T].

    A target of -100 asks for nothing. In float32 at least. Raises ``ValueError`` for shapes or ids that
    do not fit, and where nothing at all is asked.
    """
    check_shape("input_ids", input_ids, B=None, T=None)
    check_shape("targets", targets, B=input_ids.shape[0], T=input_ids.shape[1])
    asked = targets != -100
    check_token_ids("targets", targets, model.vocab_size, asked)
    require(bool(asked.any()), "targets must ask for at least one token, got none")
    return F.cross_entropy(at_least_float32(model(input_ids)).flatten(0, 1), targets.flatten().long())
