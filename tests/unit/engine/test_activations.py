"""Activation memory: what is planned is what is reserved, and what is reserved is what the ops need."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.engine.activations import Activations, device_bytes_per_token, host_bytes_per_token
from harness.engine.emitter import Emitter
from harness.engine.limits import longest_sequence, tokens_that_fit
from harness.machine.base import CPU, D2H, GPU, H2D
from tests.unit.engine.fakes import SPEC, engine, sequences
from tests.unit.machine.ops import Quick


@pytest.mark.parametrize("max_tokens", [1, 7, 100])
def test_bytes_per_token_are_those_that_are_reserved(max_tokens):
    machine = engine([]).machine
    acts = Activations(machine, SPEC, max_tokens=max_tokens, name="alpha")
    assert machine.tiers["device"].used_bytes == max_tokens * device_bytes_per_token(SPEC, None)
    assert machine.tiers["pinned"].used_bytes == max_tokens * host_bytes_per_token(SPEC)
    assert all(name.startswith("alpha ") for tier in machine.tiers.values() for name in tier.holders())
    acts.close()
    assert all(tier.used_bytes == 0 for tier in machine.tiers.values())


@settings(max_examples=50)
@given(
    layers=st.integers(1, 3),
    batches=st.integers(1, 3),
    taken=st.integers(0, 1 << 22),
    reserved=st.integers(0, 1 << 20),
    predicted=st.integers(0, 4),
)
def test_as_many_tokens_as_are_said_to_fit_do_fit(layers, batches, taken, reserved, predicted):
    on = engine(sequences((5, 5)))
    on.machine.tiers["device"].reserve("embedding", taken)
    fitting = tokens_that_fit(
        on,
        num_layers_buffered=layers,
        num_micro_batches=batches,
        reserved_bytes={"mine": reserved},
        num_predicted=predicted,
    )
    assert fitting >= 1
    on.machine.tiers["device"].reserve("other", reserved + layers * on.store.layer_bytes)
    for number in range(batches):
        Activations(on.machine, SPEC, max_tokens=fitting, name=f"batch {number}", num_predicted=predicted)
    unused = on.machine.tiers["device"].free_bytes
    token_bytes = device_bytes_per_token(SPEC, None) + 12 * predicted  # a number of 8 bytes, and a score of 4
    assert unused < batches * token_bytes + (1 << 16), "more would have fitted"


@pytest.mark.parametrize("tier", ["device", "pinned"])
def test_memory_too_small_is_refused_with_every_holder_and_with_what_is_enough(tier):
    """What the message names adds up to what it asks for, and so much is enough."""
    on = engine(sequences((5, 6)))
    memory = on.machine.tiers[tier]
    memory.reserve("embedding", 5_000_000)
    wanted = {"num_layers_buffered": 2, "num_micro_batches": 3, "at_least": 10}
    wanted |= (
        {"reserved_bytes": {"kv staging": 30_000_000}} if tier == "device" else {"pinned_reserved_bytes": 30_000_000}
    )
    with pytest.raises(ConfigError) as refused:
        tokens_that_fit(on, **wanted)
    assert refused.value.field == f"hardware.{tier}_memory_gb"
    named, _, told = refused.value.message.partition(" leave room for 0 tokens of a micro-batch, 10 are needed; ")
    sizes = re.findall(r"([a-z0-9 ]+) ([0-9.]+) (B|KB|MB)(?:, |$)", named.partition("too small: ")[2])
    expected = ["kv staging", "embedding", "alignment", "2 layer buffers"] if tier == "device" else []
    assert [name for name, _, _ in sizes] == (expected or ["staging buffers", "embedding"])
    held_bytes = sum(float(size) * {"B": 1, "KB": 1e3, "MB": 1e6}[unit] for _, size, unit in sizes)
    enough_bytes = float(told.split(" GB hold the longest sequence (10 tokens)")[0]) * 1e9
    per_token = {"device": device_bytes_per_token(SPEC, None), "pinned": host_bytes_per_token(SPEC)}[tier]
    assert enough_bytes == pytest.approx(held_bytes + 10 * 3 * per_token, rel=1e-3)
    memory.capacity_bytes = int(enough_bytes * 1.001)
    assert tokens_that_fit(on, **wanted) >= 10


def test_host_memory_bounds_the_tokens_too():
    on = engine(sequences((5, 5)))
    pinned = on.machine.tiers["pinned"]
    pinned.reserve("kv cache", pinned.free_bytes - 6 * host_bytes_per_token(SPEC) - 1)
    assert tokens_that_fit(on, num_layers_buffered=1, num_micro_batches=2) == 3
    pinned.reserve("more", 5 * host_bytes_per_token(SPEC))
    with pytest.raises(ConfigError, match=r"^hardware.pinned_memory_gb: .* room for 0 tokens .*, 1 are needed"):
        tokens_that_fit(on, num_layers_buffered=1, num_micro_batches=2)


def test_what_lacks_room_for_the_longest_sequence_is_named():
    """The device has room for more than the pinned memory, and the other way round."""
    on = engine(sequences((5, 5)))
    device, pinned = on.machine.tiers["device"], on.machine.tiers["pinned"]
    pinned.reserve("kv cache", pinned.free_bytes - 7 * host_bytes_per_token(SPEC))
    assert tokens_that_fit(on, num_layers_buffered=1, num_micro_batches=1, at_least=7) == 7
    with pytest.raises(ConfigError, match=r"^hardware.pinned_memory_gb: .* room for 7 tokens .*, 8 are needed"):
        tokens_that_fit(on, num_layers_buffered=1, num_micro_batches=1, at_least=8)
    device.reserve(
        "others", device.free_bytes - on.store.layer_bytes - (1 << 16) - 6 * device_bytes_per_token(SPEC, None)
    )
    with pytest.raises(ConfigError, match=r"^hardware.device_memory_gb: "):
        tokens_that_fit(on, num_layers_buffered=1, num_micro_batches=1, at_least=7)


def test_the_longest_sequence_counts_what_is_prefilled_after_a_preemption():
    assert longest_sequence(engine(sequences((5, 6), (8, 1), (2, 3)))) == 10
    assert longest_sequence(engine([])) == 1


@given(st.lists(st.integers(1, 20), max_size=12))
def test_runs_of_rows_fit_the_staging_buffer_and_cover_all(contexts):
    nbytes = 20 * SPEC.kv_bytes_per_token_layer + 7
    runs = Emitter(engine([])).rows_that_fit(np.asarray(contexts, dtype=np.int32), nbytes)
    assert [row for rows in runs for row in rows] == list(range(len(contexts)))
    assert all(0 < sum(contexts[row] for row in rows) <= 20 for rows in runs)
    for rows, following in itertools.pairwise(runs):
        assert sum(contexts[row] for row in rows) + contexts[following.start] > 20, "the runs are not full"


def test_a_context_larger_than_the_staging_buffer_is_an_error():
    with pytest.raises(AssertionError, match="context of 21 tokens does not fit"):
        Emitter(engine([])).rows_that_fit(np.asarray([3, 21]), 20 * SPEC.kv_bytes_per_token_layer)


@pytest.mark.parametrize("seed", range(5))
def test_a_serial_emitter_overlaps_nothing(seed):
    """Not even on a machine that ignores lanes."""
    on = engine([])
    on.machine._random.seed(seed)
    emitter = Emitter(on, serial=True)
    tickets = [emitter.submit((GPU, CPU, H2D, D2H)[i % 4], Quick(packets=2)) for i in range(12)]
    on.machine.drain()
    assert all(a.finished_s <= b.started_s for a, b in itertools.pairwise(tickets))
