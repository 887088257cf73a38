"""One training loop for every rung: AdamW or Muon, warm-up and cosine, clipping, validation, exact resume.

Batch n is a function of n (``batches(n)``), what a model draws in step n is a function of the seed and of n,
and the checkpoint holds everything else that changes: weights, optimiser, curve. So a run that is killed at
any step and started again gives, bit for bit, the numbers of a run that was not.
"""

import dataclasses
import glob
import hashlib
import json
import math
import os
import platform
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from evolve.attention_residuals import PseudoQuery
from evolve.checkpoint import replacing
from evolve.checks import check_count, require
from evolve.lab import muon
from evolve.lab.seeds import generator, seed_everything
from evolve.lab.tasks import Batch
from evolve.progress import progress

__all__ = ["Run", "TrainingConfig", "learning_rate", "seed_everything", "train"]

Batches = Callable[[int], Batch]


@dataclass(frozen=True)
class TrainingConfig:
    """How to train. Raises ``ValueError`` for values that make no sense."""

    steps: int
    peak: float = 3e-3  # the largest learning rate
    warm_up: int = 50  # steps on which it rises to that in a line; a cosine takes it to 0 afterwards
    betas: tuple[float, float] = (0.9, 0.98)  # AdamW's memory of gradients and of their squares
    weight_decay: float = 0.1  # on matrices only, not on gains and biases
    clip: float = 1.0  # largest norm of the gradient
    query_rate: float = 1.0  # of Attention Residuals' pseudo-queries, as a multiple of the others' rate
    optimizer: str = "adamw"  # or "muon": Muon per head for the layers' matrices, AdamW for the rest
    seed: int = 0  # of whatever the model draws while training
    eval_every: int = 50  # steps between two validations; the last step always has one
    save_every: int = 50  # steps between two checkpoints, if there is a file for them

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warm_up", 0), ("seed", 0), ("eval_every", 1), ("save_every", 1)):
            check_count(name, getattr(self, name), least)
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON has lists only
        for name in ("peak", "clip", "query_rate"):
            x = getattr(self, name)
            fits = isinstance(x, int | float) and 0 < x < math.inf
            require(fits, f"{name} must be positive and finite, got {x!r}")
        known = ("adamw", "muon")
        require(self.optimizer in known, f"optimizer must be one of {known}, got {self.optimizer!r}")
        decay = self.weight_decay
        fits = isinstance(decay, int | float) and 0 <= decay < math.inf
        require(fits, f"weight_decay must be >= 0 and finite, got {decay!r}")
        pair = len(self.betas) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in self.betas)
        require(pair, f"betas must be two numbers in [0, 1), got {self.betas!r}")


@dataclass
class Run:
    """What a training run measured: the loss of every step, and each validation as ``{"step": ..., ...}``."""

    config: TrainingConfig
    loss: list[float] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The steps after which there was a validation."""
        return [int(row["step"]) for row in self.validation]

    def curve(self, metric: str) -> list[float]:
        """That metric of each validation. Raises ``ValueError`` if it was not measured."""
        known = sorted(self.validation[0].keys() - {"step"}) if self.validation else []
        require(metric in known, f"metric must be one of {known}, got {metric!r}")
        return [row[metric] for row in self.validation]

    def save(self, path: str | os.PathLike, *, command: str) -> None:
        """Store the run as JSON, with the command that repeats it and the versions that made it."""
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        stored = {"command": command, "versions": versions} | dataclasses.asdict(self)
        with replacing(Path(path)) as file:
            file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Run":
        """Read a stored run. Raises ``ValueError`` naming the file if it is not one."""
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            config = TrainingConfig(**stored["config"])
            return cls(config, [float(x) for x in stored["loss"]], [dict(r) for r in stored["validation"]])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a stored run: {error}") from error


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up to ``peak``, then half a cosine that reaches 0 after the last step."""
    if step < config.warm_up:
        return config.peak * (step + 1) / config.warm_up
    share = (step - config.warm_up) / max(1, config.steps - config.warm_up)
    return config.peak * (1 + math.cos(math.pi * share)) / 2


def train(
    model: nn.Module,
    batches: Batches,
    config: TrainingConfig,
    *,
    validate: Callable[[nn.Module], dict[str, float]] | None = None,
    checkpoint: str | os.PathLike | None = None,
    until: int | None = None,
    label: str = "training",
) -> Run:
    """Train ``model`` in place on ``batches(0), batches(1), ...`` and return the curve.

    ``model.loss(input_ids, targets)`` is minimised; batches are moved to the model's device.
    ``validate(model)`` returns named numbers. With a ``checkpoint`` file the run goes on from it if it
    exists, exactly as if it had never stopped. ``until`` ends it after that many steps of the same schedule
    (to look at the beginning of a long run). The global random state is seeded at every step and put back
    at the end. Denormal numbers are flushed to zero on the CPU, since they slow a nearly finished run by a
    factor of three.

    Raises ``ValueError`` if the checkpoint is damaged or belongs to another run, ``FloatingPointError``
    naming the step if the loss or its gradient is not finite (model and checkpoint keep the last good step).
    """
    last = config.steps if until is None else until
    check_count("until", last)
    require(last <= config.steps, f"until must be at most steps = {config.steps}, got {until}")
    torch.set_flush_denormal(True)
    optimizer = _optimizer(model, config)
    run, identity = Run(config), _identity(model, batches, config)
    file = None if checkpoint is None else Path(checkpoint)
    require(file is None or file.parent.is_dir(), f"checkpoint must lie in an existing folder, got {file}")
    with torch.random.fork_rng(), progress(last, label) as bar:
        if file is not None and file.exists():
            _resume(file, identity, model, optimizer, run, last)
        bar.update(len(run.loss))
        while len(run.loss) < last:
            _step(model, batches, optimizer, run)
            done = len(run.loss)
            if validate is not None and (done % config.eval_every == 0 or done == config.steps):
                run.validation.append({"step": done} | _validated(model, validate))
            if file is not None and (done % config.save_every == 0 or done == last):
                _save(file, identity, model, optimizer, run)
            bar.update(1)
            bar.set_postfix_str(f"loss {run.loss[-1]:.3f}", refresh=False)
    return run


Optimizer = torch.optim.Optimizer | muon.Joined


def _optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    if config.optimizer == "adamw":
        return _adamw([p for p in model.parameters() if p.requires_grad], model, config)
    served = muon.matrices(model)
    require(bool(served), "model must have matrices in its layers for Muon, got none")
    named = dict(model.named_parameters())
    groups = [{"params": [named[name]], "rows": rows} for name, rows in served.items()]
    rest = [p for name, p in named.items() if p.requires_grad and name not in served]
    parts = {"muon": muon.Muon(groups, lr=config.peak, weight_decay=config.weight_decay)}
    return muon.Joined(parts | {"adamw": _adamw(rest, model, config)})


def _adamw(params: list[nn.Parameter], model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    def is_matrix(p: nn.Parameter) -> bool:  # or a stack of experts' matrices; a convolution's is [C, 1, W]
        return p.ndim == 2 or (p.ndim == 3 and p.shape[1] > 1)

    of_sites = {id(m.weight) for m in model.modules() if isinstance(m, PseudoQuery)}
    queries = [p for p in params if id(p) in of_sites]
    rest = [p for p in params if id(p) not in of_sites]
    groups = [
        {"params": [p for p in rest if is_matrix(p)], "weight_decay": config.weight_decay, "rate": 1.0},
        {"params": [p for p in rest if not is_matrix(p)], "weight_decay": 0.0, "rate": 1.0},
        {"params": queries, "weight_decay": config.weight_decay, "rate": config.query_rate},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.peak, betas=config.betas)


def _step(model: nn.Module, batches: Batches, optimizer: Optimizer, run: Run) -> None:
    """One step of descent; nothing has changed if the loss turns out not to be finite."""
    step = len(run.loss)
    torch.manual_seed(generator(run.config.seed, step).initial_seed())  # dropout, on every device
    batch, device = batches(step), next(model.parameters()).device
    model.train()
    loss = model.loss(batch.input_ids.to(device), batch.targets.to(device))
    value = loss.item()
    _check_finite("loss", value, step)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    # A finite loss can have a gradient that is not (sqrt at 0): one such step would spoil every weight.
    _check_finite("gradient's norm", nn.utils.clip_grad_norm_(model.parameters(), run.config.clip), step)
    for group in optimizer.param_groups:
        group["lr"] = group["rate"] * learning_rate(run.config, step)
    optimizer.step()
    run.loss.append(value)


def _check_finite(name: str, value: float | torch.Tensor, step: int) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the {name} became {float(value)} at step {step}: try a smaller peak or clip"
        )


@torch.no_grad()
def _validated(model: nn.Module, validate: Callable[[nn.Module], dict[str, float]]) -> dict[str, float]:
    """The validation's numbers; the model's mode is as before."""
    was_training = model.training
    try:
        return {name: float(x) for name, x in validate(model.eval()).items()}
    finally:
        model.train(was_training)


# -------------------------------------------------------------------------------------- checkpoints


def _identity(model: nn.Module, batches: Batches, config: TrainingConfig) -> dict[str, str]:
    """What must be the same for a checkpoint to belong to this run, as text."""
    first = batches(0)
    tensors = (first.input_ids, first.targets)
    data = hashlib.sha256(
        b"".join(f"{tuple(x.shape)} {x.dtype}".encode() + x.cpu().numpy().tobytes() for x in tensors)
    )
    form = {name: f"{list(p.shape)} {p.dtype}" for name, p in model.named_parameters()}
    form["config"] = repr(getattr(model, "config", None))  # what no shape shows: heads, gates, the mixer
    form["modules"] = repr(list(model.children()))
    fields = {name: repr(value) for name, value in dataclasses.asdict(config).items()}
    return fields | {"model": json.dumps(form), "data": data.hexdigest()}


def _save(file: Path, identity: dict, model: nn.Module, optimizer: Optimizer, run: Run) -> None:
    state = {
        "identity": identity,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loss": run.loss,
        "validation": run.validation,
    }
    for leftover in file.parent.glob(f".{glob.escape(file.name)}.*.tmp"):  # of a run killed while saving
        leftover.unlink(missing_ok=True)
    with replacing(file) as temporary:
        torch.save(state, temporary)


def _resume(file: Path, identity: dict, model: nn.Module, optimizer: Optimizer, run: Run, last: int) -> None:
    """Put everything back as it was when ``file`` was written; the file itself is never touched."""
    try:
        with zipfile.ZipFile(file) as archive:  # torch stores checksums, but does not look at them
            require(archive.testzip() is None, "a checksum does not fit")
        state = torch.load(file, weights_only=True, map_location="cpu")
        differing = [key for key in identity if state["identity"].get(key) != identity[key]]
        loss, validation = [float(x) for x in state["loss"]], [dict(row) for row in state["validation"]]
        require(len(loss) <= run.config.steps, "it holds more steps than the run has")
        if (
            not differing and len(loss) <= last
        ):  # the model comes last and cannot fail, so nothing is half put back
            form = {name: t.shape for name, t in model.state_dict().items()}
            require({name: t.shape for name, t in state["model"].items()} == form, "weights do not fit")
            optimizer.load_state_dict(state["optimizer"])
    except Exception as error:  # torch raises many kinds for a damaged file
        raise ValueError(f"checkpoint {file} is damaged or not one of ours: {error!r}"[:300]) from error
    require(
        not differing,
        f"checkpoint {file} belongs to another run: {', '.join(differing)} differ",
    )
    require(len(loss) <= last, f"until must be at least the {len(loss)} steps of {file}, got {last}")
    model.load_state_dict(state["model"])
    run.loss, run.validation = loss, validation
