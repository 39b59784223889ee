"""Shares of a model: what they add up to, and that every number of a checkpoint is where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.model.checkpoint import part_views
from harness.model.families.mixtral import FAMILY
from harness.model.sharding import shard_spec, shard_start
from tests.unit.engine.fakes import SPEC


def tensors(source, layer: int, name: str) -> dict[str, torch.Tensor]:
    (layout,) = (part for part in source.family.layer_parts(source.spec, layer) if part.name == name)
    region = torch.empty(layout.nbytes, dtype=torch.uint8)
    source.read_part(layer, layout, region)
    return part_views(layout, region)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shares_of_a_checkpoint_are_the_checkpoint(tiny, num_ranks):
    spec, shards = tiny.spec, [tiny.shard(rank, num_ranks) for rank in range(num_ranks)]

    def joined(name: str, tensor: str, pick=lambda x: x, dim: int = 0) -> torch.Tensor:
        return torch.cat([pick(tensors(shard, 1, name)[tensor]) for shard in shards], dim)

    whole_in, whole_out = tensors(tiny, 1, "attention_in"), tensors(tiny, 1, "attention_out")
    whole_expert = tensors(tiny, 1, "expert.3")
    q_rows, kv_rows = spec.q_dim // num_ranks, shards[0].spec.kv_dim
    assert torch.equal(joined("attention_in", "qkv", lambda x: x[:q_rows]), whole_in["qkv"][: spec.q_dim])
    copies = max(1, num_ranks // spec.num_kv_heads)  # ranks that keep the same KV head
    keys, values = whole_in["qkv"][spec.q_dim :].split(spec.kv_dim)
    for at, expected in ((q_rows, keys), (q_rows + kv_rows, values)):
        rows = [tensors(shard, 1, "attention_in")["qkv"][at : at + kv_rows] for shard in shards]
        assert torch.equal(torch.cat(rows[::copies]), expected)
        assert all(torch.equal(rows[i], rows[i - i % copies]) for i in range(num_ranks))
    assert torch.equal(joined("attention_out", "o", dim=1), whole_out["o"])
    gate, up = whole_expert["gate_up"].chunk(2)
    assert torch.equal(joined("expert.3", "gate_up", lambda x: x.chunk(2)[0]), gate)
    assert torch.equal(joined("expert.3", "gate_up", lambda x: x.chunk(2)[1]), up)
    assert torch.equal(joined("expert.3", "down", dim=1), whole_expert["down"])
    for shard in shards:
        assert torch.equal(tensors(shard, 1, "attention_out")["router"], whole_out["router"])
        assert torch.equal(tensors(shard, 1, "attention_in")["input_norm"], whole_in["input_norm"])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_partial_results_add_up_to_the_layer(tiny, num_ranks):
    """Of an expert, and of the output projection over all heads, in float64."""
    spec, shards = tiny.spec, [tiny.shard(rank, num_ranks) for rank in range(num_ranks)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, spec.hidden_dim, generator=generator).double()
    attn = torch.randn(5, spec.q_dim, generator=generator).double()

    def double(source, name):
        return {key: value.double() for key, value in tensors(source, 2, name).items()}

    experts = [FAMILY.expert(s.spec, double(s, "expert.1"), x) for s in shards]
    torch.testing.assert_close(sum(experts), FAMILY.expert(spec, double(tiny, "expert.1"), x))
    pieces = zip(shards, attn.chunk(num_ranks, -1), strict=True)
    projected = [FAMILY.output_projection(s.spec, double(s, "attention_out"), piece, 1) for s, piece in pieces]
    torch.testing.assert_close(sum(projected), FAMILY.output_projection(spec, double(tiny, "attention_out"), attn, 1))


@given(num_ranks=st.sampled_from([1, 2, 4, 8]), heads=st.integers(1, 4), group=st.integers(1, 8))
def test_work_is_divided_and_nothing_of_it_lost(num_ranks, heads, group):
    spec = replace(SPEC, num_heads=8 * heads * group, num_kv_heads=8 * heads, expert_dim=96)
    shard = shard_spec(spec, num_ranks)
    assert num_ranks * shard.expert_params == spec.expert_params
    assert num_ranks * shard.attention_params == spec.attention_params
    assert num_ranks * shard.kv_bytes_per_token == spec.kv_bytes_per_token
    assert num_ranks * shard.decode_pair_flops == spec.decode_pair_flops
    assert shard.group_size == spec.group_size


@given(mine=st.integers(1, 9), num_shares=st.sampled_from([1, 2, 4, 8]), copies=st.sampled_from([1, 2, 4]))
def test_shares_cover_the_whole_once_for_every_copy(mine, num_shares, copies):
    whole, num_ranks = mine * num_shares, num_shares * copies
    covered = [0] * whole
    for rank in range(num_ranks):
        start = shard_start(whole, mine, rank, num_ranks)
        for place in range(start, start + mine):
            covered[place] += 1
    assert covered == [copies] * whole


@pytest.mark.parametrize(
    ("change", "num_ranks", "told"),
    [
        ({}, 3, "num_kv_heads 2"),
        ({"num_kv_heads": 4, "num_heads": 4}, 8, "num_heads 4"),
        ({"expert_dim": 97}, 2, "expert_dim 97"),
        ({"shared_expert_dim": 5}, 2, "shared_expert_dim 5"),
    ],
)
def test_what_cannot_be_divided_is_told(change, num_ranks, told):
    with pytest.raises(ConfigError, match=f"^hardware.num_gpus: must divide the model's {told}"):
        shard_spec(replace(SPEC, **change), num_ranks)
