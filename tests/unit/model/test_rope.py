"""RoPE and its stretching by YaRN against transformers' own functions and modules."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from harness.config import ConfigError, parse
from harness.model import families
from harness.model.dimensions import LatentAttention, Yarn
from harness.model.functional import apply_rope, inverse_frequencies, rope_tables
from harness.model.spec import ModelSpec
from tests.unit.engine.fakes import SPEC
from tests.unit.model.test_model_layout import MIXTRAL_8X7B

GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
DEEPSEEK_V2_LITE = {  # published under `rope_scaling`
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
HALF = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}


def spec_with(**entries: Any) -> ModelSpec:
    return families.layout("mixtral").spec_from_config({**MIXTRAL_8X7B, **entries}, "m", "float32")


def theirs_with(**entries: Any) -> tuple[torch.Tensor, float]:
    config = AutoConfig.for_model(**{**MIXTRAL_8X7B, "head_dim": 128, **entries})
    return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")


yarns = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "factor": st.sampled_from([0.5, 1.0, 2, 40.0]),
        "original_max_position_embeddings": st.sampled_from([4, 64, 4096, 32768]),
    },
    optional={
        "beta_fast": st.sampled_from([None, 0, 32, 8.0]),
        "beta_slow": st.sampled_from([None, 0, 1, 2.5]),
        "truncate": st.booleans(),
        "attention_factor": st.sampled_from([None, 1.25]),
        "mscale": st.sampled_from([None, 0, 1.0, 0.707]),
        "mscale_all_dim": st.sampled_from([None, 0, 1.0, 0.5]),
        "rope_theta": st.sampled_from([1e4, 150000]),
    },
)


@given(entries=yarns, head_dim=st.sampled_from([2, 16, 64, 128]))
def test_yarn_is_that_of_transformers(entries, head_dim):
    spec = spec_with(rope_parameters=dict(entries), head_dim=head_dim)
    frequencies, scale = theirs_with(rope_parameters=dict(entries), head_dim=head_dim)
    assert torch.equal(inverse_frequencies(spec.rope_theta, head_dim, spec.yarn), frequencies)
    assert spec.yarn is not None and spec.yarn.table_scale == scale


def test_tables_are_those_of_gpt_oss():
    config = AutoConfig.for_model("gpt_oss", rope_parameters={**GPT_OSS, "rope_theta": 150000})
    yarn = spec_with(rope_parameters=GPT_OSS).yarn
    positions = torch.tensor([0, 1, 4095, 4096, 131071])
    for dtype in (torch.float32, torch.bfloat16):
        theirs = GptOssRotaryEmbedding(config)(torch.empty(0, dtype=dtype), positions[None])
        ours = rope_tables(150000.0, config.head_dim, 131072, dtype, torch.device("cpu"), yarn)
        for table, expected in zip(ours, theirs, strict=True):
            assert torch.equal(table[positions, 0], expected[0])


@pytest.mark.parametrize("place", ["inside", "beside", "both"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_is_found_under_all_names(key, place):
    """The published files have `type`, and the base beside the mapping; transformers 5 writes both inside."""
    nested = DEEPSEEK_V2_LITE | ({} if place == "beside" else {"rope_theta": 2e4})
    entries = {key: nested} | ({} if place == "inside" else {"rope_theta": 3e4})
    spec = spec_with(**entries)
    yarn = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
    assert spec.yarn == yarn
    theirs = AutoConfig.for_model(**{**MIXTRAL_8X7B, **{k: dict(v) if k == key else v for k, v in entries.items()}})
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"] == (3e4 if place == "beside" else 2e4)


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 512},
        {"rope_parameters": dict(GPT_OSS), "original_max_position_embeddings": 512},
    ],
)
def test_the_original_positions_are_taken_from_where_transformers_takes_them(entries):
    """From beside the mapping, else from inside, else they are all positions."""
    spec = spec_with(**deepcopy(entries))
    frequencies, _ = theirs_with(**entries)
    assert torch.equal(inverse_frequencies(spec.rope_theta, spec.head_dim, spec.yarn), frequencies)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("rope", [DEEPSEEK_V2_LITE, HALF, {**HALF, "mscale_all_dim": 0}, {"type": "default"}])
def test_scores_are_scaled_as_deepseek_scales_them(family, rope):
    """By the temperature once more for queries and for keys; models without latent attention do not."""
    config = AutoConfig.for_model(family, rope_scaling=dict(rope), q_lora_rank=None, num_attention_heads=1)
    module = {"deepseek_v2": deepseek_v2.DeepseekV2Attention, "deepseek_v3": deepseek_v3.DeepseekV3Attention}[family]
    with torch.device("meta"):
        scaling = module(config, 0).scaling
    latent = LatentAttention(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    plain = replace(SPEC, head_dim=192, yarn=spec_with(rope_scaling=dict(rope)).yarn)
    assert replace(plain, latent=latent).attention_scale == pytest.approx(scaling, rel=1e-15)
    assert plain.attention_scale == 192**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved_pairs_turn_as_deepseek_turns_them(dtype):
    """Both arrange the result in their own way; version 2 rounds only the result, version 3 the tables too."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(9, heads, 64, generator=generator).to(dtype) for heads in (3, 1))
    yarn = parse(Yarn, {"factor": 40, "original_max_position_embeddings": 4096})
    batched = [x.transpose(0, 1)[None] for x in (q, k)]  # [1, heads, tokens, head_dim]
    positions = torch.arange(7, 16)[None]

    def ours(table_dtype):
        cos, sin = rope_tables(1e4, 64, 32, table_dtype, torch.device("cpu"), yarn)
        cos, sin = cos[positions[0]], sin[positions[0]]
        return [apply_rope(x, cos, sin, interleaved=True) for x in (q, k)]

    def config(family):
        rope = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
        return AutoConfig.for_model(family, rope_scaling=rope, qk_rope_head_dim=64)

    tables = deepseek_v3.DeepseekV3RotaryEmbedding(config("deepseek_v3"))(q, positions)
    for got, expected in zip(ours(dtype), deepseek_v3.apply_rotary_pos_emb_interleave(*batched, *tables), strict=True):
        assert torch.equal(got, expected[0].transpose(0, 1))

    turns = deepseek_v2.DeepseekV2RotaryEmbedding(config("deepseek_v2"))(q, positions)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    for got, expected in zip(ours(torch.float32), deepseek_v2.apply_rotary_emb(*batched, turns), strict=True):
        pairs = torch.stack(got.chunk(2, dim=-1), dim=-1).flatten(-2)
        assert got.dtype is dtype
        torch.testing.assert_close(pairs, expected[0].transpose(0, 1), **tolerance)


def test_pairs_of_halves_turn_by_the_angle():
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    cos, sin = (table.double() for table in rope_tables(1e4, 8, 4, torch.float32, torch.device("cpu")))
    turned = apply_rope(x, cos, sin)
    for token in range(4):
        for pair in range(4):
            angle = token / 1e4 ** (2 * pair / 8)
            a, b = x[token, :, pair], x[token, :, pair + 4]
            expected = a * math.cos(angle) - b * math.sin(angle)
            torch.testing.assert_close(turned[token, :, pair], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type: must be 'default' or 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type: must be 'default' or 'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor: missing"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "rope_scaling.factor: missing"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor: must be a valid number, got '4'"),
        ({"rope_scaling": {"type": "yarn", "factor": -4}}, "rope_scaling.factor: must be positive, got -4"),
        ({"rope_scaling": {**HALF, "beta_fast": 0.5}}, "rope_scaling.beta_fast: must be at least beta_slow 1.0"),
        ({"rope_scaling": {**HALF, "truncate": None}}, "rope_scaling.truncate: must be a valid boolean, got None"),
        ({"rope_scaling": {**HALF, "attention_factor": 0.0}}, "rope_scaling.attention_factor: must be positive"),
        ({"rope_scaling": HALF, "rope_theta": 1.0}, "rope_theta: must be above 1 with YaRN, got 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: must be 1"),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor: must be 1"),
        ({"rope_parameters": {"full_attention": HALF}}, "rope_parameters: must be a mapping, the same for all layers"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(entries, named):
    with pytest.raises(ConfigError) as raised:
        spec_with(**entries)
    assert raised.value.field == "model.path" and named in raised.value.message
    assert "\n" not in str(raised.value)
