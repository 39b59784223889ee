"""Faults that a hurried author could make, planted one at a time: each must show as wrong tokens or as an error.

Undeclared reads and writes are found by the shuffled machine, which ignores lane order and poisons memory. Wrong data
(stale, swapped, shifted, dropped) is found by verification, without any poison.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import yaml
from safetensors.torch import load_file, save_file

from harness.engine.ops.data import FetchSampled
from harness.engine.ops.experts import Experts
from harness.engine.ops.host import DecodeAttention
from harness.machine.base import MachineError
from harness.machine.shuffled import ShuffledMachine
from harness.memory.transfers import CopyWeights
from harness.memory.weights import EXPERTS, WeightStream
from harness.model.checkpoint import Checkpoint
from strategies.moelens import vslpipe
from tests.conftest import ROOT
from tests.contract.running import CAPACITIES_BYTES, check_tokens, engine_on, requests, run_to_end, strategy_of

pytestmark = pytest.mark.usefixtures("short_probes")

SEEDS = (0, 1, 2)
MANY_SEEDS = range(30)
MOELENS = yaml.safe_load((ROOT / "conf/strategy/moelens.yaml").read_text()) | {"n_real": 60, "profile_repeats": 1}


def outcome(tiny, seed: int, *, poison: bool) -> Literal["right", "wrong tokens", "error"]:
    machine = ShuffledMachine(capacities_bytes=CAPACITIES_BYTES, seed=seed, poison=poison)
    work = requests(5, vocab_size=tiny.spec.vocab_size, longest=24, max_new_tokens=8, seed=5)
    engine = engine_on(machine, tiny, work, kv_blocks=60)
    try:
        run_to_end(engine, lambda e: strategy_of(e, MOELENS))
        report = check_tokens(tiny, engine.sequences)
    except (MachineError, AssertionError):
        return "error"
    assert report.checked == len(work)
    return "right" if report.ok else "wrong tokens"


@pytest.mark.parametrize(("seed", "poison"), [*((seed, True) for seed in SEEDS), (0, False)])
def test_without_a_fault_the_tokens_are_right(tiny, seed, poison):
    assert outcome(tiny, seed, poison=poison) == "right"


def forgets(cls: type, which: str, keys: Callable) -> tuple[type, str, Callable]:
    """The op `cls` leaves `keys(op)` out of what it declares."""
    return cls, which, keys


UNDECLARED = {  # a few: `test_declared.py` has them all, and finds them in one run each
    "experts do not read their weights": forgets(Experts, "reads", lambda op: op.weight_keys),
    "decode attention does not read the cache": forgets(DecodeAttention, "reads", lambda op: op.kv_keys),
    "sampled tokens are fetched unread": forgets(FetchSampled, "reads", lambda op: op.reads),
}


@pytest.mark.parametrize(("cls", "which", "keys"), UNDECLARED.values(), ids=UNDECLARED.keys())
def test_an_undeclared_access_is_caught(tiny, monkeypatch, cls, which, keys):
    original = cls.__init__

    def forgetful(self, *args, **kwargs):
        original(self, *args, **kwargs)
        left_out = keys(self)
        setattr(self, which, tuple(key for key in getattr(self, which) if key not in left_out))

    monkeypatch.setattr(cls, "__init__", forgetful)
    assert any(outcome(tiny, seed, poison=True) != "right" for seed in MANY_SEEDS)  # some show in few legal orders only


def brings_expert_3_of_layer_2(op: CopyWeights, packet: int) -> bool:
    is_piece_3 = packet // (op.packets // op.pieces) == 3
    return op.layer == 2 and op.source.layout.name == EXPERTS and is_piece_3


def stale_expert(monkeypatch):
    """One expert of one layer is not transferred: what lay in the slot before is used."""
    original = CopyWeights.run

    def run(self, ctx, packet):
        if not brings_expert_3_of_layer_2(self, packet):
            original(self, ctx, packet)

    monkeypatch.setattr(CopyWeights, "run", run)


def other_slot(monkeypatch):
    """An expert is looked for in the slot of the neighbouring layer."""
    original = WeightStream.experts

    def experts(self, index):
        found = original(self, index)
        if EXPERTS not in self.part_names(index):  # the profiler's stream
            return found
        other = self._experts_together(self.layer(index), self._slots[(index + 1) % self.depth][EXPERTS])
        return found | {1: replace(found[1], buffer=other[1].buffer)}

    monkeypatch.setattr(WeightStream, "experts", experts)


def swapped_experts(monkeypatch):
    original = Experts.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.layer == 1:
            self.parts = (self.parts[1], self.parts[0], *self.parts[2:])

    monkeypatch.setattr(Experts, "__init__", init)


def changed_batch(change: Callable) -> Callable:
    def plant(monkeypatch):
        original = vslpipe.assemble

        def assemble(*args):
            batch = original(*args)
            for array in (batch.positions, batch.slots, batch.last_rows, batch.kv_reads.tables, batch.kv_reads.lens):
                array.setflags(write=True)
            change(batch)
            return batch

        monkeypatch.setattr(vslpipe, "assemble", assemble)

    return plant


def shift_positions(batch) -> None:
    """Of decode tokens only: RoPE is relative, a shift of everything changes nothing."""
    batch.positions[batch.num_prefill_tokens :] += 1


def drop_block(batch) -> None:
    """The second block of a context is lost, the first is read in its place."""
    for table, length in zip(batch.kv_reads.tables, batch.kv_reads.lens, strict=True):
        if length > 8:
            table[1] = table[0]


def cut_context(batch) -> None:
    batch.kv_reads.lens[:] = batch.kv_reads.lens.clip(max=8)


def misplace_token(batch) -> None:
    """The newest token of each context lands where the one before it is."""
    batch.slots[batch.num_prefill_tokens :] -= 1


def exchange_rows(batch) -> None:
    batch.last_rows[:] = batch.last_rows[::-1].copy()


WRONG_DATA = {
    "stale expert": stale_expert,
    "expert of another layer": other_slot,
    "swapped experts": swapped_experts,
    "shifted positions": changed_batch(shift_positions),
    "dropped KV block": changed_batch(drop_block),
    "context cut short": changed_batch(cut_context),
    "misplaced KV token": changed_batch(misplace_token),
    "tokens of other sequences": changed_batch(exchange_rows),
}


@pytest.mark.parametrize("plant", WRONG_DATA.values(), ids=WRONG_DATA.keys())
def test_wrong_data_is_caught(tiny, monkeypatch, plant):
    plant(monkeypatch)
    assert "wrong tokens" in {outcome(tiny, seed, poison=False) for seed in SEEDS}


def expert_of_nan(monkeypatch):
    """One expert of one layer arrives as NaN."""
    original = CopyWeights.run

    def run(self, ctx, packet):
        original(self, ctx, packet)
        if brings_expert_3_of_layer_2(self, packet):
            target = ctx.tensor(self.target, (self.source.layout.nbytes,), "uint8")
            target[3 * self.piece_bytes : 4 * self.piece_bytes].fill_(0xFF)

    monkeypatch.setattr(CopyWeights, "run", run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_are_not_finite_verify_nothing(tiny, tmp_path, monkeypatch, dtype):
    """In the run alone, and in run and reference alike, where each takes token 0 for the largest of NaN."""
    with monkeypatch.context() as patched:
        expert_of_nan(patched)
        assert outcome(Checkpoint(tiny.folder, dtype), 0, poison=False) == "wrong tokens"
    copy = shutil.copytree(tiny.folder, tmp_path / "overflow")
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] *= 1e38
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert outcome(Checkpoint(copy, dtype), 0, poison=False) == "wrong tokens"
