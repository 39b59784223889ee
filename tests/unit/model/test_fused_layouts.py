"""What the layouts of DBRX and gpt-oss read from config.json; what they refuse; and how GPUs divide fused tensors."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from harness.config import ConfigError
from harness.model import families
from harness.model.checkpoint import Checkpoint, part_views
from harness.model.dimensions import ClampedSwiglu, Yarn
from harness.verify.reference import reference_config
from tests.tiny_families import tiny_family
from tests.unit.model.published import PUBLISHED
from tests.unit.model.test_checkpoint import edit_json

DBRX, GPT_OSS = PUBLISHED["dbrx"].config, PUBLISHED["gpt-oss-120b"].config
ATTENTION, FFN = DBRX["attn_config"], DBRX["ffn_config"]
ALTERNATE = ["sliding_attention", "full_attention"] * 18


def read(entries):
    return families.layout(entries["model_type"]).spec_from_config(entries, "m", "bfloat16")


def views(source, layer: int, name: str) -> dict[str, torch.Tensor]:
    (layout,) = (part for part in source.family.layer_parts(source.spec, layer) if part.name == name)
    region = torch.empty(layout.nbytes, dtype=torch.uint8)
    source.read_part(layer, layout, region)
    return part_views(layout, region)


def test_dimensions_of_dbrx_have_two_names():
    names = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
    names |= {"max_seq_len": "max_position_embeddings"}
    other = {names.get(key, key): value for key, value in DBRX.items()}
    assert read(other) == read(DBRX)
    theirs = AutoConfig.for_model(**other)
    assert [getattr(theirs, name) for name in names] == [DBRX[name] for name in names]
    with pytest.raises(ConfigError, match="d_model: must agree with hidden_size 512, got 6144"):
        read(DBRX | {"hidden_size": 512})


def test_what_dbrx_leaves_out_is_what_transformers_assumes():
    least = DBRX | {"attn_config": {"rope_theta": 1e4}, "ffn_config": {**FFN, "ffn_act_fn": None}}
    spec, theirs = read(least), AutoConfig.for_model(**least)
    assert spec.num_kv_heads == theirs.attn_config.kv_n_heads == 1
    assert spec.clip_qkv is theirs.attn_config.clip_qkv is None
    assert spec.router.renormalise == (theirs.ffn_config.moe_normalize_expert_weights == 1.0)
    assert not read(DBRX | {"ffn_config": {**FFN, "moe_normalize_expert_weights": None}}).router.renormalise


@pytest.mark.parametrize("place", ["attn_config", "rope_parameters", "both"])
def test_the_base_of_rope_reaches_the_reference_of_dbrx(place, tmp_path):
    """Published files have it in attn_config, where transformers 5 does not look."""
    attention = {"kv_n_heads": 2} | ({} if place == "rope_parameters" else {"rope_theta": 7e4})
    entries = {"attn_config": attention} | ({} if place == "attn_config" else {"rope_theta": 7e4})
    copied = shutil.copytree(tiny_family("dbrx").folder, tmp_path / "copy")
    edit_json(copied / "config.json", lambda found: found.pop("rope_parameters") and found.update(entries))
    checkpoint = Checkpoint(copied)
    config = reference_config(checkpoint)
    assert checkpoint.spec.rope_theta == config.rope_parameters["rope_theta"] == config.attn_config.rope_theta == 7e4


def test_gpt_oss_is_stretched_where_config_json_says_nothing():
    silent = {key: value for key, value in GPT_OSS.items() if key not in ("rope_scaling", "rope_theta")}
    spec, theirs = read(silent), AutoConfig.for_model(**silent).rope_parameters
    assert spec.yarn == Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False)
    assert spec.yarn.factor == theirs["factor"] and spec.yarn.truncate == theirs["truncate"]
    assert spec.rope_theta == theirs["rope_theta"]
    assert read(silent | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}).yarn is None
    assert AutoConfig.for_model(**silent, rope_parameters={}).rope_parameters["rope_type"] == "default"
    assert read(silent | {"rope_parameters": {}}).yarn is None


def test_layers_of_gpt_oss_slide_as_their_types_say():
    silent = {key: value for key, value in GPT_OSS.items() if key not in ("layer_types", "sliding_window")}
    assert [read(silent).window(layer) for layer in range(4)] == [128, None, 128, None]
    assert AutoConfig.for_model(**silent).layer_types == ALTERNATE
    every = read(GPT_OSS | {"layer_types": ["sliding_attention"] * 36, "sliding_window": 64})
    assert {every.window(layer) for layer in range(36)} == {64}
    assert read(GPT_OSS | {"layer_types": ["full_attention"] * 36}).sliding_window is None


def test_the_activation_of_gpt_oss_is_told_by_config_json():
    assert read(GPT_OSS).clamped_swiglu == ClampedSwiglu()
    assert read(GPT_OSS | {"swiglu_limit": 3.5, "swiglu_alpha": 1.0}).clamped_swiglu == ClampedSwiglu(
        limit=3.5, alpha=1.0
    )
    default = AutoConfig.for_model("gpt_oss")
    assert ClampedSwiglu(limit=default.swiglu_limit, alpha=default.swiglu_alpha) == ClampedSwiglu()


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (DBRX | {"tie_word_embeddings": True}, "tie_word_embeddings: must be False, got True"),
        (DBRX | {"d_model": 6100}, "d_model: must be an even multiple of n_heads 48, got 6100"),
        (DBRX | {"max_seq_len": None}, "max_seq_len: missing"),
        (DBRX | {"attn_config": 3}, "attn_config: must be a mapping, got 3"),
        (DBRX | {"attn_config": {**ATTENTION, "kv_n_heads": 7}}, "attn_config.kv_n_heads: must divide n_heads 48"),
        (DBRX | {"attn_config": {**ATTENTION, "clip_qkv": 0}}, "attn_config.clip_qkv: must be a positive number"),
        (DBRX | {"rope_theta": 1e4}, "attn_config.rope_theta: must be 10000.0 as in rope_parameters, got 500000.0"),
        (DBRX | {"ffn_config": {**FFN, "moe_top_k": 17}}, "ffn_config.moe_top_k: must be at most moe_num_experts 16"),
        (DBRX | {"ffn_config": {**FFN, "moe_normalize_expert_weights": 2}}, "moe_normalize_expert_weights: must be 1"),
        (DBRX | {"ffn_config": {**FFN, "ffn_act_fn": {"name": "gelu"}}}, "ffn_config.ffn_act_fn.name: must be 'silu'"),
        (DBRX | {"ffn_config": {}}, "ffn_config.moe_num_experts: missing"),
        (GPT_OSS | {"head_dim": None}, "head_dim: missing"),
        (GPT_OSS | {"layer_types": ALTERNATE[::-1]}, "layer_types: must give a window to all layers"),
        (GPT_OSS | {"layer_types": ALTERNATE[:3]}, "layer_types: must be 36 times"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window: must be a positive integer with 'sliding_attention'"),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit: must be a positive number, got 0"),
        (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act: must be 'silu'"),
        (GPT_OSS | {"attention_bias": 1}, "attention_bias: must be true or false"),
        (GPT_OSS | {"num_experts": 32}, "num_local_experts: must agree with num_experts 32, got 128"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name(entries, told):
    with pytest.raises(ConfigError) as raised:
        read(entries)
    assert raised.value.field == "model.path" and told in raised.value.message
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", ["dbrx", "gpt_oss"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gpus_together_have_what_one_has(family, num_ranks):
    """Heads of the fused projection and of biases, where four GPUs share two KV heads; and experts, whose partial
    results are added up, one bias and all."""
    whole = tiny_family(family)
    spec, shards = whole.spec, [whole.shard(rank, num_ranks) for rank in range(num_ranks)]
    for tensor in ("qkv", "qkv_bias") if spec.qkv_bias else ("qkv",):
        mine = views(whole, 1, "attention_in")[tensor]
        theirs = [views(shard, 1, "attention_in")[tensor] for shard in shards]
        rows = spec.q_dim // num_ranks
        assert torch.equal(torch.cat([each[:rows] for each in theirs]), mine[: spec.q_dim])
        keys, values = mine[spec.q_dim :].view(2, spec.num_kv_heads, -1)
        for rank, each in enumerate(theirs):
            heads = slice(rank, rank + 1) if num_ranks == 2 else slice(rank // 2, rank // 2 + 1)
            assert torch.equal(
                each[rows:], torch.cat((keys[heads].flatten(), values[heads].flatten())).view_as(each[rows:])
            )
    if spec.attention_sinks:
        sinks = [views_of_attention(shard)["sinks"] for shard in shards]
        assert torch.equal(torch.cat(sinks), views_of_attention(whole)["sinks"])
    x = torch.randn(7, spec.hidden_dim, generator=torch.Generator().manual_seed(0)).double()

    def run(source):
        w = {name: view.double() for name, view in views(source, 1, "expert.3").items()}
        return source.family.expert(source.spec, w, x)

    torch.testing.assert_close(sum(run(shard) for shard in shards), run(whole))


def views_of_attention(source) -> dict[str, torch.Tensor]:
    layout = source.family.attention_part(source.spec, 1)
    region = torch.empty(layout.nbytes, dtype=torch.uint8)
    source.read_part(1, layout, region)
    return part_views(layout, region)


@pytest.mark.parametrize("family", ["dbrx", "gpt_oss"])
def test_kernels_are_told_the_expert_that_the_family_computes(family):
    """Their formula, by the matrices, biases and constants that they are given."""
    checkpoint = tiny_family(family)
    spec = replace(
        checkpoint.spec, clamped_swiglu=checkpoint.spec.clamped_swiglu and ClampedSwiglu(limit=0.5, alpha=3.0)
    )
    w = views(checkpoint, 2, "expert.5")
    m = checkpoint.family.expert_matrices(spec, w)
    assert m.shape.has_biases == spec.expert_bias and len(m.addresses) == 6
    x = torch.randn(9, spec.hidden_dim, generator=torch.Generator().manual_seed(1))
    gate_bias, up_bias, down_bias = m.biases or (None, None, None)
    gate, up = F.linear(x, m.gate, gate_bias), F.linear(x, m.up, up_bias)
    if m.activation.name == "silu":
        gated = F.silu(gate) * up
    else:
        gate, up = gate.clamp(max=m.activation.limit), up.clamp(-m.activation.limit, m.activation.limit)
        gated = (up + 1) * gate * torch.sigmoid(gate * m.activation.alpha)
    torch.testing.assert_close(F.linear(gated, m.down, down_bias), checkpoint.family.expert(spec, w, x))
