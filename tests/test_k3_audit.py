"""Kimi K3 on ``meta``: every released tensor, parameters, bytes, cache; other sizes in closed form."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from evolve.k3 import K3, K3Config, VisionConfig, released_tensors
from evolve.k3_audit import MILLION, audit, main
from evolve.lab import accounting

U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16
LAYER = {
    "input_layernorm": (7168,), "post_attention_layernorm": (7168,), "self_attention_res_norm": (7168,),
    "mlp_res_norm": (7168,), "self_attention_res_proj": (1, 7168), "mlp_res_proj": (1, 7168),
}  # fmt: skip
KDA = {
    "q_proj.weight": (12288, 7168), "k_proj.weight": (12288, 7168), "v_proj.weight": (12288, 7168),
    "g_proj.weight": (12288, 7168), "o_proj.weight": (7168, 12288), "f_a_proj.weight": (128, 7168),
    "f_b_proj.weight": (12288, 128), "b_proj.weight": (96, 7168),
}  # fmt: skip
KDA_F32 = {
    "q_conv1d.weight": (12288, 1, 4), "k_conv1d.weight": (12288, 1, 4), "v_conv1d.weight": (12288, 1, 4),
    "A_log": (128,), "dt_bias": (12288,), "o_norm.weight": (128,),
}  # fmt: skip
MLA = {
    "q_a_proj": (1536, 7168), "q_a_layernorm": (1536,), "q_b_proj": (18432, 1536),
    "kv_a_proj_with_mqa": (576, 7168), "kv_a_layernorm": (512,), "kv_b_proj": (24576, 512),
    "g_proj": (12288, 7168), "o_proj": (7168, 12288),
}  # fmt: skip
MOE = {
    "gate": (896, 7168), "routed_expert_down_proj": (3584, 7168), "routed_expert_norm": (3584,),
    "routed_expert_up_proj": (7168, 3584), "shared_experts.gate_proj": (6144, 7168),
    "shared_experts.up_proj": (6144, 7168), "shared_experts.down_proj": (7168, 6144),
}  # fmt: skip
EXPERT = {
    "w1.weight_packed": (3072, 1792), "w1.weight_scale": (3072, 112), "w3.weight_packed": (3072, 1792),
    "w3.weight_scale": (3072, 112), "w2.weight_packed": (3584, 1536), "w2.weight_scale": (3584, 96),
}  # fmt: skip
BLOCK = {
    "norm0": (1024,), "norm1": (1024,), "wqkv": (4608, 1024), "wo": (1024, 1536), "mlp.fc0": (4096, 1024),
    "mlp.fc1": (1024, 4096),
}  # fmt: skip


def released_list() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every tensor of the release, written down from its description and not from this package's modules."""
    table = {"model.embed_tokens": (163840, 7168), "lm_head": (163840, 7168), "model.norm": (7168,)}
    table |= {"model.output_attn_res_norm": (7168,), "model.output_attn_res_proj": (1, 7168)}
    bf16 = {f"language_model.{name}.weight": shape for name, shape in table.items()}
    f32, u8 = {}, {}
    for l in range(93):
        layer = f"language_model.model.layers.{l}"
        attention, moe = f"{layer}.self_attn", f"{layer}.block_sparse_moe"
        bf16 |= {f"{layer}.{name}.weight": shape for name, shape in LAYER.items()}
        if l % 4 == 3 or l == 92:
            bf16 |= {f"{attention}.{name}.weight": shape for name, shape in MLA.items()}
        else:
            bf16 |= {f"{attention}.{name}": shape for name, shape in KDA.items()}
            f32 |= {f"{attention}.{name}": shape for name, shape in KDA_F32.items()}
        if l == 0:
            mlp = {"gate_proj": (33792, 7168), "up_proj": (33792, 7168), "down_proj": (7168, 33792)}
            bf16 |= {f"{layer}.mlp.{name}.weight": shape for name, shape in mlp.items()}
            continue
        bf16 |= {f"{moe}.{name}.weight": shape for name, shape in MOE.items()}
        f32[f"{moe}.gate.e_score_correction_bias"] = (896,)
        u8 |= {f"{moe}.experts.{e}.{name}": shape for e in range(896) for name, shape in EXPERT.items()}
    for l in range(27):
        bf16 |= {f"vision_tower.encoder.blocks.{l}.{name}.weight": shape for name, shape in BLOCK.items()}
    bf16 |= {
        "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
        "vision_tower.encoder.final_layernorm.weight": (1024,),
        "mm_projector.proj.0.weight": (4096, 4096),
        "mm_projector.proj.2.weight": (7168, 4096),
        "mm_projector.post_norm.weight": (7168,),
    }
    kinds = {BF16: bf16, F32: f32, U8: u8}
    return {name: (shape, dtype) for dtype, kind in kinds.items() for name, shape in kind.items()}


def test_every_tensor_of_the_release():
    got, want = released_tensors(K3Config.official()), released_list()
    assert len(got) == len(want) == 497_220
    assert {name: (tuple(shape), dtype) for name, (shape, dtype) in got.items()} == want


def test_the_released_model_in_numbers():
    found = audit(K3Config.official())
    text, everything = found.total(text_only=True), found.total()
    assert (text.parameters, text.activated) == (2_779_484_476_000, 104_189_612_640)
    assert (everything.tensors, everything.nbytes) == (497_220, 1_560_860_324_864)
    assert everything.parameters == 2_779_931_834_976
    rows = {part: (row.parameters, row.activated) for part, row in found.rows.items()}
    assert rows["KDA"] == (30_618_086_496,) * 2
    assert rows["MLA"] == (5_572_706_304,) * 2
    assert rows["routed experts"] == (2_722_740_830_208, 48_620_371_968)
    assert rows["shared experts"] == (12_155_092_992,) * 2
    assert rows["latent projections"] == (4_726_980_608,) * 2
    assert rows["routers, latent norms"] == (591_284_736,) * 2
    assert rows["dense networks"] == (726_663_168,) * 2
    assert rows["layer norms, AttnRes"] == (3_999_744,) * 2
    assert rows["final norm, last AttnRes"] == (21_504,) * 2
    assert rows["embedding"] == (1_174_405_120, 0)
    assert rows["head"] == (1_174_405_120,) * 2
    assert (rows["vision tower"][0], rows["projector"][0]) == (401_214_464, 46_144_512)
    assert found.latent_bytes == 24 * 576 * 2
    assert found.state_bytes == 69 * 96 * 128 * 128 * 4
    assert found.conv_bytes == 69 * 3 * 3 * 12288 * 2
    assert found.sequence_bytes(MILLION) == 28_991_029_248 + 434_110_464 + 15_261_696


# Sizes that differ in every dimension, so that a count which mixes two of them up cannot come out right.
ODD = {
    "vocab_size": 211, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 11,
    "num_attention_heads": 3, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6, "v_head_dim": 10, "linear_num_heads": 5, "linear_head_dim": 14,
    "short_conv_kernel_size": 3, "num_experts": 12, "num_experts_per_token": 3, "num_shared_experts": 2,
    "moe_intermediate_size": 64, "routed_expert_hidden_size": 32, "first_k_dense_replace": 2,
    "attn_res_block_size": 3, "quantized": True, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_experts": 40, "num_hidden_layers": 18}, {"vision": VisionConfig(vt_num_hidden_layers=2)}],
)
def test_another_number_of_experts_and_depth_follow_the_closed_form(changes):
    c = K3Config.nano(**ODD | changes)
    D, H, K = c.hidden_size, c.linear_num_heads, c.linear_head_dim
    P, heads, R, Q = H * K, c.num_attention_heads, c.kv_lora_rank, c.q_lora_rank
    width, V, E, F, Z = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim, c.num_experts, 64, 32
    islands = 3 * P * c.short_conv_kernel_size + P + K  # float32 of a KDA layer, but for A_log
    kda = 5 * D * P + D * K + K * P + D * H + islands + H
    mla = D * Q + Q + Q * heads * width + D * (R + c.qk_rope_head_dim) + R
    mla += R * heads * (c.qk_nope_head_dim + V) + 2 * D * heads * V
    L, dense = c.num_hidden_layers, c.first_k_dense_replace
    mlas, sparse = len([l for l in range(1, L + 1) if l % 4 == 0 or l == L]), L - dense
    expert, shared = 3 * Z * F, 3 * D * c.num_shared_experts * F
    rest = (L - mlas) * kda + mlas * mla + 6 * L * D + 3 * D + dense * 3 * D * c.intermediate_size
    rest += sparse * (shared + 2 * D * Z + Z + E * D + E) + c.vocab_size * D
    found = audit(c)
    text = found.total(text_only=True)
    assert text.parameters == rest + sparse * E * expert + c.vocab_size * D
    assert text.activated == rest + sparse * c.num_experts_per_token * expert
    packed = sparse * E * (expert // 2 + expert // 32)
    padding = max(K - H, 0) * 4 * (L - mlas)
    in_float32 = (L - mlas) * (islands + H) + sparse * E
    assert text.nbytes == 2 * (rest + c.vocab_size * D) + 2 * in_float32 + packed + padding
    per_layer = (L - mlas) * 14 + mlas * 8 + 6 * L + 3 * dense + sparse * (8 + 6 * E)
    assert text.tensors == per_layer + 5
    assert found.latent_bytes == mlas * (R + c.qk_rope_head_dim) * 2
    assert found.state_bytes == (L - mlas) * H * K * K * 4
    assert found.conv_bytes == (L - mlas) * 3 * P * (c.short_conv_kernel_size - 1) * 2
    vision = 6 * 2 + 6 if c.vision else 0
    assert found.total().tensors - text.tensors == vision
    with torch.device("meta"):
        net = K3(c)
    assert accounting.parameters(net) == text.parameters
    assert found.sequence_bytes(50) == accounting.cache_bytes(net, 50)


def test_the_command_prints_the_table_in_time_and_memory(tmp_path):
    command = [sys.executable, "-m", "evolve.k3", "--audit"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_utime + usage.ru_stime < 60  # not the clock's: whatever else the machine does
    assert usage.ru_maxrss < 4 * 2**20  # KiB
    lines = (tmp_path / "out").read_text()
    for number in ("497,220", "2,779,484,476,000", "104,189,612,640", "1,560,860,324,864", "27,648"):
        assert number in lines


def test_the_command_takes_another_configuration_and_refuses_what_is_none(tmp_path, capsys):
    K3(dataclasses.replace(K3Config.nano(), num_experts=2)).save_pretrained(tmp_path)
    main(["--audit", "--config", str(tmp_path / "config.json")])
    assert "everything" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["--audit", "--config", str(tmp_path)])
    assert 'model_type must be "kimi_k3"' in capsys.readouterr().err
