"""Kimi K3 end to end on the kernels, interpreted: the PyTorch path's logits, caches and gradients."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from evolve.attention_residuals import PseudoQuery
from evolve.backends import modules_with_backend, set_backend
from evolve.decoder import GatedFeedForward
from evolve.deltanet import DeltaNet
from evolve.gated_deltanet import GatedDeltaNet
from evolve.k3 import K3, K3Config
from evolve.kda import KimiDeltaAttention
from evolve.short_conv import ShortConvolution
from evolve.situ import SituGLU

SIZES = {"vocab_size": 19, "hidden_size": 20, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "linear_num_heads": 1, "linear_head_dim": 20, "attn_res_block_size": 1}
SIZES |= {"num_experts": 3, "num_experts_per_token": 2, "moe_intermediate_size": 16}
SIZES |= {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
IDS = torch.tensor([[3, 1, 4, 1, 5], [6, 5, 3, 5, 8]])
DECODES = {"kda_decode_kernel", "depth_read_kernel", "situ_glu_kernel"}
PREFILLS = {"chunk_prepare_kernel", "chunk_walk_kernel", "short_conv_kernel"} | DECODES - {
    "kda_decode_kernel"
}
LEARNS = {"chunk_walk_backward_kernel", "state_gradients_kernel", "chunk_prepare_backward_kernel"}
LEARNS |= {"depth_read_backward_kernel", "site_gradients_kernel", "depth_add_backward_kernel"}
LEARNS |= {"situ_glu_backward_kernel", "short_conv_backward_kernel", "depth_add_kernel"} | PREFILLS


def model(backend: str | None, two_phase: bool = True) -> K3:
    """KDA and a dense network, then MLA and experts, each a block, with pseudo-queries that choose."""
    torch.manual_seed(0)
    config = K3Config.nano(**SIZES, initializer_range=0.2)
    net = K3(config, two_phase=two_phase, backend=backend)
    for module in net.modules():
        if isinstance(module, PseudoQuery):
            nn.init.normal_(module.weight)
    return net


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("two_phase", [False, True])
@torch.no_grad()
def test_prefill_and_decode_equal_the_pytorch_path(two_phase: bool, launches) -> None:
    """A prompt, then token by token, and what the caches hold afterwards."""
    outputs, caches = {}, {}
    for backend in ("torch", "triton"):
        net = model(backend, two_phase)
        cache = caches[backend] = net.new_cache(2)
        outputs[backend] = [net(IDS[:, :3], cache)]
        if backend == "triton":
            assert set(launches) >= PREFILLS
            launches.clear()
        outputs[backend] += [net(IDS[:, t : t + 1], cache) for t in (3, 4)]
        assert (set(launches) >= DECODES) == (backend == "triton")
    same(torch.cat(outputs["triton"], 1), torch.cat(outputs["torch"], 1))
    same(torch.cat(outputs["triton"], 1), model("torch")(IDS))
    assert launches["kda_decode_kernel"] == 2  # two tokens, one layer
    for ours, theirs in zip(caches["triton"].layers, caches["torch"].layers):
        assert ours.stored().keys() == theirs.stored().keys()
        for name, want in theirs.stored().items():
            same(ours.stored()[name], want)


def test_loss_and_every_gradient_equal_the_pytorch_path(launches) -> None:
    nets = [model(backend) for backend in ("torch", "triton")]
    losses = [net.loss(IDS[:1, :-1], IDS[:1, 1:]) for net in nets]
    for loss in losses:
        loss.backward()
    assert set(launches) >= LEARNS
    same(losses[1], losses[0])
    learnt = 0
    for (name, ours), theirs in zip(nets[1].named_parameters(), nets[0].parameters()):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            bound = 1e-4 * max(1e-2, theirs.grad.abs().max().item())
            assert (ours.grad - theirs.grad).abs().max() <= bound, name
            learnt += bool(theirs.grad.any())
    assert learnt > 40


@torch.no_grad()
def test_padding_is_never_seen(launches) -> None:
    """Left padding, whatever it holds, then a token more: the rows that are shorter, alone."""
    net = model("triton")
    mask = torch.tensor([[True, True, True], [False, True, True]])
    ids = IDS[:, :3].masked_fill(~mask, 0)
    cache, alone = net.new_cache(2), net.new_cache(1)
    got = [net(ids, cache, mask)[1:, 1:], net(IDS[:, 3:4], cache)[1:]]
    want = [net(ids[1:, 1:], alone), net(IDS[1:, 3:4], alone)]
    same(torch.cat(got, 1), torch.cat(want, 1))
    assert set(launches) >= PREFILLS | DECODES


def test_a_backend_reaches_every_part_and_nothing_else() -> None:
    net = model(None)
    parts = modules_with_backend(net)
    kinds = {type(part) for part in parts.values()}
    assert kinds >= {K3, KimiDeltaAttention, ShortConvolution, SituGLU}
    assert all(part.backend is None for part in parts.values())
    assert set_backend(net, "triton") is net
    assert {part.backend for part in parts.values()} == {"triton"}
    assert {part.backend for part in modules_with_backend(model("torch")).values()} == {"torch"}
    assert not any("backend" in name for name in net.state_dict())
    plain = GatedFeedForward(4, 8)
    before = dict(vars(plain))
    assert vars(set_backend(plain, "triton")) == before
    with pytest.raises(ValueError, match="backend must be None"):
        set_backend(net, "cuda")
    assert {part.backend for part in parts.values()} == {"triton"}, "bad input changes nothing"


@torch.no_grad()
def test_loaded_and_streamed_models_take_the_kernels(tmp_path, launches) -> None:
    """A backend is set after loading, and reaches experts that stay packed or in their file."""
    net, ids = model("torch", two_phase=False), IDS[:1, :2]
    net.save_pretrained(tmp_path)
    for load in (K3.from_pretrained, K3.streamed):
        launches.clear()
        kernels, torch_path = (set_backend(load(tmp_path), backend)(ids) for backend in ("triton", "torch"))
        same(kernels, torch_path)
        assert set(launches) >= PREFILLS


def test_layers_take_a_backend_as_a_whole(launches) -> None:
    """Built with one or told later: no part of a layer is left on the other path."""
    layers = [KimiDeltaAttention(8, 1, 8, backend="torch"), set_backend(GatedDeltaNet(8, 1, 8), "triton")]
    layers += [set_backend(DeltaNet(8, 1, 8), "triton")]
    for layer, backend in zip(layers, ("torch", "triton", "triton")):
        launches.clear()
        assert {part.backend for part in modules_with_backend(layer).values()} == {backend}
        assert len(modules_with_backend(layer)) == 4  # the rule and three convolutions
        layer(torch.randn(1, 2, 8))
        assert set(launches) == (
            {"chunk_prepare_kernel", "chunk_walk_kernel", "short_conv_kernel"}
            if backend == "triton"
            else set()
        )


def test_float64_is_refused_and_tells_what_to_do() -> None:
    with pytest.raises(ValueError, match='takes no float64 inputs: backend=None or "torch" runs'):
        model("triton").double()(IDS)
