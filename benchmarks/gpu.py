"""The Triton kernels on a real GPU, in one run of a few minutes: right first, then timed beside their peers.

    python -m benchmarks.gpu                    all of it, into results/gpu.json
    python -m benchmarks.gpu --list             the cases, without a GPU

Nothing is timed before everything is right: outputs and gradients of every case, float32 and bfloat16,
against the PyTorch form in float64 on the same rounded inputs. Each launch is then timed alone and set beside
its bound (``benchmarks.roofline``), each call beside FLA's where it can be imported, PyTorch's form, SDPA and
a plain copy. Times are medians of repetitions with a cold L2 cache.
"""

import argparse
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases import CASES, Case, call, decode_inputs, rule_inputs
from benchmarks.operation_cases import Operation

RESULT = Path(__file__).parent / "results" / "gpu.json"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # ‖difference‖ / ‖reference‖
CHECKED_TOKENS = 200  # three chunks and a part of one
BUDGET_S = 230  # peers are left out, by name, once it is spent
NO_GPU = "no CUDA device here: nothing measured, nothing written (--list shows what would be)"
FLA = {  # our rule -> FLA's function and what it wants besides the tokens
    "channel": ("fla.ops.kda", "chunk_kda", {}),
    "head": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", {}),
    "delta": ("fla.ops.delta_rule", "chunk_delta_rule", {}),
    "linear": ("fla.ops.linear_attn", "chunk_linear_attn", {"normalize": False}),
}


def rule_of(case: Case) -> str:
    return case.gate if case.gate != "none" else "delta" if case.erase else "linear"


def torch_form(case: Case, given: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The PyTorch form of the case's rule on the same inputs, in their precision."""
    stems = {
        "channel": "kda",
        "head": "gated_delta_rule",
        "delta": "delta_rule",
        "linear": "linear_attention",
    }
    modules = {"channel": "kda", "head": "gated_deltanet", "delta": "deltanet", "linear": "linear_attention"}
    form = getattr(
        importlib.import_module(f"evolve.{modules[rule_of(case)]}"), f"chunk_{stems[rule_of(case)]}"
    )
    return form(**{n: x for n, x in given.items() if x is not None}, output_final_state=True, backend="torch")


def differences(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """‖ours − reference‖ / ‖reference‖ of the output, the last state and, where asked for, every gradient."""
    from evolve_kernels.chunk_rule import chunk_rule

    case = dataclasses.replace(case, T=CHECKED_TOKENS)
    ours = {n: x for n, x in rule_inputs(case, device, dtype).items() if x is not None}
    exact = {n: x.double().requires_grad_(case.backward) for n, x in ours.items()}
    ours = {n: x.requires_grad_(case.backward) for n, x in ours.items()}
    o, S = chunk_rule(**ours, lower_bound=case.lower_bound)
    o_exact, S_exact = torch_form(case, exact)
    pairs = {"o": (o, o_exact), "state": (S, S_exact)}
    if case.backward:
        w, w_S = torch.randn_like(o), torch.randn_like(S)
        grads = torch.autograd.grad((o, S), list(ours.values()), (w, w_S))
        wants = torch.autograd.grad((o_exact, S_exact), list(exact.values()), (w.double(), w_S.double()))
        pairs |= {f"d{name}": pair for name, pair in zip(ours, zip(grads, wants))}
    return {name: relative(*pair) for name, pair in pairs.items()}


def relative(got: Tensor, want: Tensor) -> float:
    """NaN stays NaN, and fails every comparison."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


@torch.no_grad()
def decode_differences(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """The fused decode step against the layer's operations, one after the other, in float64."""
    from evolve.kda import kda_gate, recurrent_kda
    from evolve.norms import l2_normalize, rms_norm
    from evolve.short_conv import short_conv
    from evolve_kernels.kda_decode import kda_decode

    given = decode_inputs(case, device, dtype)
    ours = kda_decode(**given)
    x = {
        n: t.double()
        if isinstance(t, Tensor)
        else tuple(y.double() for y in t)
        if isinstance(t, tuple)
        else t
        for n, t in given.items()
    }
    convolved, histories = [], []
    for u, history, weight in zip((x["q"], x["k"], x["v"]), x["histories"], x["conv_weights"]):
        y, kept = short_conv(u.flatten(1)[:, None], weight, history)
        convolved.append(y.view(u.shape)[:, None])
        histories.append(kept)
    q, k, v = convolved
    g = kda_gate(x["z"][:, None], x["A_log"], x["dt_bias"], lower_bound=case.lower_bound)
    tokens = (l2_normalize(q), l2_normalize(k), v, g, x["b"].sigmoid()[:, None])
    o, S = recurrent_kda(*tokens, initial_state=x["state"], output_final_state=True)
    y = rms_norm(o[:, 0], 1e-5) * x["gain"] * x["gate"].sigmoid()
    pairs = {"y": (ours.y, y), "state": (ours.state, S)}
    pairs |= {f"{n}_history": pair for n, pair in zip("qkv", zip(ours.histories, histories))}
    return {name: relative(*pair) for name, pair in pairs.items()}


def operation_differences(case: Operation, device: str, dtype: torch.dtype) -> dict[str, float]:
    """The output and, where asked for, the gradient of every floating-point input."""
    case = case.checked()
    ours = case.inputs(device, dtype)
    floats = [n for n, x in ours.items() if x.is_floating_point()]
    exact = {n: x.double() if n in floats else x for n, x in ours.items()}
    leaves, wants = ([given[n].requires_grad_(case.backward) for n in floats] for given in (ours, exact))
    o, o_exact = case.ours(ours), case.reference(exact)
    pairs = {"o": (o, o_exact)}
    if case.backward:
        w = torch.randn_like(o)
        grads = zip(torch.autograd.grad(o, leaves, w), torch.autograd.grad(o_exact, wants, w.double()))
        pairs |= {f"d{name}": pair for name, pair in zip(floats, grads)}
    return {name: relative(*pair) for name, pair in pairs.items()}


def errors_of(case: Case | Operation, device: str, dtype: torch.dtype) -> dict[str, float]:
    """By name, the relative errors of whatever the case computes."""
    if isinstance(case, Operation):
        return operation_differences(case, device, dtype)
    return (decode_differences if case.decode else differences)(case, device, dtype)


def check(device: str) -> dict[str, dict[str, float]]:
    """Every case in both precisions. Raises: AssertionError that names what is wrong."""
    found = {}
    for name, case in CASES.items():
        for dtype, tolerance in TOLERANCE.items():
            torch.manual_seed(0)
            errors = errors_of(case, device, dtype)
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = errors
            wrong = {n: f"{e:.1e}" for n, e in errors.items() if not e <= tolerance}
            print(f"{name}, {dtype}: largest difference {max(errors.values()):.1e}", flush=True)
            assert not wrong, f"{name}, {dtype}: {wrong} beyond {tolerance:.0e}; nothing is timed"
    return found


def median_us(run: Callable[[], Any]) -> float:
    """Median time of a call on the device, with a cold L2 cache before each."""
    from triton.testing import do_bench

    return 1e3 * do_bench(run, warmup=20, rep=80, return_mode="median")


def time_launches(case: Case | Operation) -> list[dict[str, Any]]:
    """Every launch of a call alone, and the part of its bound that it reaches."""
    from benchmarks.roofline import cost
    from evolve_kernels.launch import recorded

    run = call(case, "cuda")
    with recorded() as launches:
        run()
    rows = []
    for one in launches:
        needs = cost(one)
        us = median_us(lambda: one.kernel[(one.programs,)](**one.arguments, **one.options))  # noqa: B023
        reached = needs.bound_us / us
        rows.append({"kernel": one.name, "us": us, "bound_us": needs.bound_us, "reached": reached,
                     "target": needs.target, "met": reached >= needs.target})  # fmt: skip
    return rows


def peers(case: Case | Operation) -> dict[str, Callable[[], Any]]:
    """Calls that do the same, or in SDPA's case the same job, by others; backward too, where asked for."""
    if isinstance(case, Operation):
        given = case.inputs("cuda", torch.bfloat16)
        forms = case.peers(given) | {"evolve torch": lambda: case.reference(given)}
        return {name: case.run(form, given) for name, form in forms.items()}
    given = {n: x for n, x in rule_inputs(case, "cuda").items() if x is not None}
    if case.decode:
        return fla_decode(case, given)
    leaves = [x.requires_grad_(case.backward) for x in given.values()]

    def both(form: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            o, S = form()
            return torch.autograd.grad((o, S), leaves, (o, S)) if case.backward else (o, S)

        return run

    module, name, options = FLA[rule_of(case)]
    if case.lower_bound is not None:
        options = options | {"safe_gate": True, "lower_bound": case.lower_bound}

    def fla() -> Any:
        return getattr(importlib.import_module(module), name)(**given, **options, output_final_state=True)

    heads = [given[n].detach().transpose(1, 2).repeat_interleave(case.HV // case.H, 1) for n in "qk"]
    heads.append(given["v"].detach().transpose(1, 2))
    q, k, v = (x.requires_grad_(case.backward) for x in heads)

    def sdpa() -> Any:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(o, (q, k, v), o) if case.backward else o

    return {f"fla {name}": both(fla), "sdpa": sdpa, "evolve torch": both(lambda: torch_form(case, given))}


def fla_decode(case: Case, given: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """FLA's recurrence of one token: without the convolutions, norms and gates that ours includes."""

    def run() -> Any:
        form = importlib.import_module("fla.ops.kda").fused_recurrent_kda
        return form(**given, output_final_state=True)

    return {"fla fused_recurrent_kda (recurrence only)": run}


def time_case(case: Case | Operation, started: float) -> dict[str, Any]:
    """One case: ours whole, ours launch by launch, then the peers while there is time."""
    result: dict[str, Any] = {
        "us": median_us(call(case, "cuda")),
        "launches": time_launches(case),
        "peers": {},
    }
    for name, run in peers(case).items():
        if time.monotonic() - started > BUDGET_S:
            result["peers"][name] = "left out: time was up"
            continue
        try:
            run()
            result["peers"][name] = median_us(run)
        except Exception as error:  # a peer that is absent or broken here must not end the run
            result["peers"][name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        torch.cuda.empty_cache()
    return result


def copy_bandwidth() -> float:
    """Bytes per second of a copy of 1 GiB inside the device, read and written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (median_us(lambda: y.copy_(x)) * 1e-6)


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "flash-linear-attention"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the result goes")
    options = parser.parse_args(arguments)
    if options.list:
        for name, case in CASES.items():
            print(f"{name}: {', '.join(f'{k}={v}' for k, v in vars(case).items())}")
        return 0
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    started = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False  # the float32 peers keep float32
    result = {
        "command": "python -m benchmarks.gpu",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
    }
    result |= {"device": torch.cuda.get_device_name(), "checked": check("cuda")}
    result |= {"copy_bytes_per_s": copy_bandwidth(), "cases": {}}
    for name, case in CASES.items():
        result["cases"][name] = vars(case) | time_case(case, started)
        print(name, json.dumps(result["cases"][name]), flush=True)
    result["seconds"] = round(time.monotonic() - started)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
