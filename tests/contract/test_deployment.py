"""What systems that place single experts are refused, given room for, and told of their profile run."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.machine.virtual.world import World
from harness.routing.activations import read_routing
from harness.routing.trace_file import TraceHeader, TraceRow, TraceWriter
from strategies.expert_offload.deployment import _Room
from tests.contract.running import strategy_of
from tests.contract.simulating import simulated_engine
from tests.contract.test_strategies import YAMLS


@settings(max_examples=200, deadline=None)
@given(
    needs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8),
    nbytes=st.integers(0, 1200), token_bytes=st.integers(1, 30), block_bytes=st.integers(1, 30),
)  # fmt: skip
def test_room_is_made_for_as_many_requests_as_can_be(needs, nbytes, token_bytes, block_bytes):
    """A search over all sets of requests finds no larger one with room for its longest prompt and its most blocks."""
    room = _Room(nbytes, token_bytes, block_bytes, num_micro_batches=1)

    def has_room(chosen):
        return room.taken_bytes(max(p for p, _ in chosen), 1, max(n for _, n in chosen)) <= nbytes

    number, prompt, blocks = room.most_served(needs)
    served = [each for each in needs if each[0] <= prompt and each[1] <= blocks]
    sets = (chosen for size in range(len(needs), 0, -1) for chosen in combinations(needs, size) if has_room(chosen))
    best = next(sets, ())
    assert number == len(served) == len(best)
    assert not served or (has_room(served) and (prompt, blocks) == tuple(map(max, zip(*served, strict=True))))


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("expert_cache", {"policy": "lru", "recorded": "trace"}, "recorded: must be null with policy=lru"),
        ("fiddler", {"table": "none", "popularity": "shares.json"}, "popularity: must be null with table=none"),
        ("prescope", {"table": "random", "popularity": "shares.json"}, "popularity: must be null with table=random"),
        ("prescope", {"predictor": "gate", "predictor_path": "folder"}, "predictor_path: must be null with predictor"),
        ("fate", {"predictor": "none", "predictor_path": "folder"}, "predictor_path: must be null with predictor=none"),
        ("klotski", {"num_batches": 2, "max_batches": 3}, "max_batches: must be null where num_batches is set"),
        ("fiddler", {"profile_tokens": 10**9}, "profile_tokens: must be at most 65536"),
        ("hybrimoe", {"predictor": "stated"}, r"predictor: stated needs .* routing.hit_rates or a trace that has"),
    ],
)  # fmt: skip
def test_settings_that_would_do_nothing_are_refused(name, values, told):
    engine, _ = simulated_engine("qwen3-30b-a3b", 2)
    with pytest.raises(ConfigError, match=told):
        strategy_of(engine, YAMLS[name] | values)
    engine.machine.close()


@pytest.mark.parametrize(("num_recorded", "shared"), [(12, 0), (3, 2)])
def test_a_profile_run_says_where_a_trace_has_no_other_requests(num_recorded, shared, tmp_path):
    """Prompts of a profile run have the routing of the last requests that were recorded; five requests run."""
    engine, _ = simulated_engine("qwen3-30b-a3b", 5)
    spec, path = engine.spec, tmp_path / "trace.jsonl"
    header = TraceHeader(
        model=spec.name, source="a test", layers=len(spec.moe_layers), experts=spec.num_experts,
        k=spec.experts_per_token, first_layer=spec.moe_layers[0],
    )  # fmt: skip
    writer = TraceWriter(path, header)
    rng = np.random.default_rng(0)
    for request in range(num_recorded):
        chosen = [rng.permutation(spec.num_experts)[: spec.experts_per_token] for _ in spec.moe_layers]
        writer.write(TraceRow(request, 0, np.array([chosen], dtype=np.int16)))
    writer.close()
    engine.machine.world = World(read_routing(path, spec), spec.num_experts)
    length = engine.sequences[0].prompt_len
    plan = strategy_of(engine, YAMLS["prescope"] | {"profile_tokens": 2 * length, "predictor": "none"}).plan
    engine.machine.close()
    told = f"profile run of {2 * length} tokens of random prompts"
    assert plan["profile_run"].startswith(told)
    assert ("2 of 2 were the run's own" in plan["profile_run"]) == bool(shared), plan["profile_run"]
