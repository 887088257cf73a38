"""What becomes of a layer's output along depth: in a residual stream, and with Attention Residuals.

A decoder of L layers has 2L sub-layers (attention and feed-forward in turn) and reads at 2L + 1 sites, the
last of them before the head. Whatever the wiring, a site reads a weighted sum of the embedding and of the
outputs before it: with weights 1 in a residual stream, with a softmax's in Attention Residuals. So one trace
serves for both: site i reads Σ_j c_ij o_j, o_0 being the embedding.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files

import torch
from torch import Tensor

from evolve.attention_residuals import AttnResDecoder, DepthMemory, site, source_weights
from evolve.checks import require
from evolve.decoder import Decoder
from evolve.lab.small import MIXERS
from evolve.lab.tasks import Batch
from evolve.lab.text import VOCAB_SIZE, TextBatches, standard_library
from evolve.lab.training import Run, TrainingConfig, train

BLOCK, BATCH, EXAM = 96, 8, 1_000_000  # tokens a sequence, sequences a step, the batch that is looked at
LAYERS = 12
HEADS = {"num_heads": 2, "head_dim": 16, "head_v_dim": 32}
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128}


@dataclass(frozen=True)
class Trace:
    """outputs: o_j, 2L + 1 tensors [B, T, D], the embedding first. reads: of 2L + 1 sites, [B, T, D] each.
    weights: c [2L + 1, 2L + 1], averaged over tokens, 0 where a site cannot look."""

    outputs: list[Tensor]
    reads: list[Tensor]
    weights: Tensor

    def lengths(self) -> Tensor:
        """Mean length ‖·‖ of what each site reads, [2L + 1]."""
        return torch.stack([x.norm(dim=-1).mean() for x in self.reads]).detach()

    def output_lengths(self) -> Tensor:
        """Mean length of the embedding and of each output, [2L + 1]."""
        return torch.stack([x.norm(dim=-1).mean() for x in self.outputs]).detach()

    def shares(self, j: int = 1) -> Tensor:
        """c_ij ‖o_j‖ / ‖read_i‖ for the sites i after output j: how much of it they read, by length alone.
        [2L + 1 − j]; j = 1 is the first layer's attention. A product of two means over tokens, of the weight
        and of the ratio: near the mean product at the head, up to a fifth below it at some sites.

        Raises ``ValueError`` for an unknown j.
        """
        last = len(self.outputs) - 1
        require(type(j) is int and 0 <= j <= last, f"j must be an output's index, 0 to {last}, got {j!r}")
        part = self.outputs[j].norm(dim=-1)
        ratios = [(part / x.norm(dim=-1)).mean() for x in self.reads[j:]]
        return (torch.stack(ratios) * self.weights[j:, j]).detach()


def trace(model: Decoder, input_ids: Tensor) -> Trace:
    """Run ``model`` on ``input_ids`` [B, T] and record what every sub-layer reads and returns."""
    require(isinstance(model, Decoder), f"model must be a Decoder, got {type(model).__name__}")
    outputs, reads = [], []
    with _recording(model, outputs, reads):
        model(input_ids)
    return Trace(outputs, reads, _weights(model, outputs))


def gradients(model: Decoder, batch: Batch) -> Tensor:
    """Size of the loss's gradient with respect to all parameters of each decoder layer together, [L].

    The pseudo-queries and their gains are left out: the residual stream has none to compare.
    """
    names = [[n for n, _ in layer.named_parameters() if "_res_" not in n] for layer in model.layers]
    parameters = [[layer.get_parameter(n) for n in chosen] for layer, chosen in zip(model.layers, names)]
    flat = [p for layer in parameters for p in layer]
    grads = iter(torch.autograd.grad(model.loss(batch.input_ids, batch.targets), flat))
    return torch.stack([sum(next(grads).square().sum() for _ in layer).sqrt() for layer in parameters])


@contextmanager
def _recording(model: Decoder, outputs: list[Tensor], reads: list[Tensor]) -> Iterator[None]:
    """Norms see what a site reads; mixers and feed-forward networks return what is stored."""
    norms = [n for layer in model.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    parts = [part for layer in model.layers for part in (layer.self_attn, layer.feed_forward)]
    hooks = [m.register_forward_pre_hook(lambda _, args: reads.append(args[0])) for m in (*norms, model.norm)]
    kept = (model.embed_tokens, *parts)
    hooks += [m.register_forward_hook(lambda _, __, out: outputs.append(out)) for m in kept]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _weights(model: Decoder, outputs: list[Tensor]) -> Tensor:
    n = len(outputs)
    if not isinstance(model, AttnResDecoder):
        return torch.ones(n, n).tril()
    sites = [(layer, name) for layer in model.layers for name in layer.SITES]
    sites.append((model, "output_attn_res"))
    memory, weights = DepthMemory(outputs[0], model.block_size), torch.zeros(n, n)
    finished, present = [], [0]  # which outputs each source is the sum of
    for i, (module, name) in enumerate(sites):
        if i < n - 1 and i % model.block_size == 0:
            memory.before(i)
            finished, present = [*finished, present], []
        p = source_weights(memory.sources, *site(module, name), eps=model.eps)
        members = [*finished, present] if present else finished
        for weight, summed in zip(p.flatten(1).mean(1).tolist(), members, strict=True):
            weights[i, summed] = weight
        if i < n - 1:
            memory.add(outputs[i + 1])
            present = [*present, i + 1]
    return weights


def deep_model(block_size: int | None, *, num_layers: int = LAYERS, seed: int = 0) -> Decoder:
    """Softmax attention with a short convolution in ``num_layers`` layers: with a residual stream if
    ``block_size`` is ``None``, else with Attention Residuals (0.7 % more parameters at the default size)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixers = [MIXERS["softmax_attention"](SIZES["hidden_size"], **HEADS) for _ in range(num_layers)]
        if block_size is None:
            return Decoder(mixers, **SIZES)
        return AttnResDecoder(mixers, block_size=block_size, **SIZES)


@dataclass(frozen=True)
class DepthRun:
    """A deep model on text. ``looks``: what ``look`` finds in it before and after training."""

    name: str
    block_size: int | None
    seed: int
    run: Run
    looks: Mapping[str, Mapping[str, list]] = field(default_factory=dict)

    def build(self) -> Decoder:
        """The model before training."""
        return deep_model(self.block_size, seed=self.seed)

    def repeat(self, until: int | None = None) -> tuple[Decoder, Run]:
        """Train it again, for the first ``until`` steps of its schedule or to the end."""
        corpus, net = standard_library(), self.build()
        exam = TextBatches(corpus.validation, BLOCK, 64)(EXAM)
        return net, train(
            net,
            TextBatches(corpus.training, BLOCK, BATCH, seed=self.seed),
            self.run.config,
            validate=lambda model: {"loss": model.loss(exam.input_ids, exam.targets).item()},
            until=until,
            label=self.name,
        )

    def measured(self) -> "DepthRun":
        """The same run with its curve and both looks."""
        before = look(self.build())
        net, run = self.repeat()
        run = dataclasses.replace(run, loss=[float(f"{x:.5g}") for x in run.loss])
        return dataclasses.replace(self, run=run, looks={"before": before, "after": look(net)})


def look(model: Decoder) -> dict[str, list]:
    """Lengths, the first output's shares, weights and gradients on held-out text, to four digits."""
    batch = TextBatches(standard_library().validation, BLOCK, 16)(EXAM)
    with torch.no_grad():
        seen = trace(model, batch.input_ids)
    found = {
        "reads": seen.lengths(), "outputs": seen.output_lengths(), "shares": seen.shares(),
        "weights": seen.weights, "gradients": gradients(model, batch),
    }  # fmt: skip
    return {name: _digits(x) for name, x in found.items()}


def _digits(x: Tensor) -> list:
    return [_digits(row) if row.ndim else float(f"{row.item():.4g}") for row in x]


def load_runs() -> list[DepthRun]:
    """The runs of ``results/depth.json``, made by ``python -m benchmarks.depth``."""
    rows = json.loads((files("evolve.lab") / "results" / "depth.json").read_text("utf-8"))["runs"]
    return [
        DepthRun(**row | {"run": Run(**row["run"] | {"config": TrainingConfig(**row["run"]["config"])})})
        for row in rows
    ]
