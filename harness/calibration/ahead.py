"""Measure what ops of a GPU take by themselves, and what launching each of them takes the host.

Where lanes are streams, an op may be launched long before it can begin, and then takes its own time only; one that
begins as soon as it is launched takes at least as long as its launching. So both are measured: ops are launched behind
others that keep the GPU busy for longer than that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice, pairwise

from harness.bench.shapes import Shape
from harness.calibration.joined import features_of
from harness.calibration.op_costs import Recording, alike_ops, mean
from harness.calibration.probes import Chain, LayerProbes
from harness.calibration.table import Points
from harness.calibration.undisturbed import Undisturbed
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.ops import compute
from harness.machine.base import GPU, Ticket, TicketState

_DRAWS = 3
_HOLDING = 5  # ops in front; with those measured they must not be more than stand in a stream at once
_EXPERTS = 8  # of a layer, measured apart
_LOOK_EVERY_S = 1e-4
_PROMPT_TOKENS = 100


class LaunchedAhead:
    """Measures ops of the gpu lane that were launched before they could begin. `own` has their seconds, `launching`
    those that the host took for each, by cost key."""

    def __init__(self, engine: Engine, probes: LayerProbes, undisturbed: Undisturbed) -> None:
        self._engine, self._probes, self._undisturbed = engine, probes, undisturbed
        self.own: dict[str, Points] = {}
        self.launching: dict[str, Points] = {}

    def measure(self, shapes: Iterable[Shape], log: Callable[[str], None]) -> None:
        """Measure all shapes, if the machine launches ahead at all."""
        if not self._engine.machine.launches_ahead:
            return
        log("ops launched ahead")
        for shape in shapes:
            for chain in (self._beside_experts, self._experts, self._probes.some_experts):
                for _ in range(_DRAWS):
                    name = f"ops launched ahead, {shape}"
                    self._keep(self._undisturbed(name, partial(self._launched, shape, chain)))
        self._undisturbed.fill_gaps()

    def _keep(self, measured: list[tuple[Ticket, float]]) -> None:
        launching_s = dict(measured)
        own, launching = map(self._undisturbed.place_in, (self.own, self.launching))
        for key, alike in alike_ops(launching_s):
            features = mean(features_of(ticket.op) for ticket in alike)
            own_s, took_s = mean((_seconds(ticket), launching_s[ticket]) for ticket in alike)
            own.setdefault(key, []).append((features, own_s))
            launching.setdefault(key, []).append((features, took_s))

    def _launched(self, shape: Shape, chain: Chain) -> list[tuple[Ticket, float]]:
        """Run a chain of ops of one micro-batch; return them with the seconds in which each was launched. None counts
        where the ops in front had ended before the last one was launched."""
        machine, probes = self._engine.machine, self._probes
        layer = probes.layer
        it, _ = probes.pair(shape)
        in_front = probes.batch(1, _longest(probes.acts[1].max_tokens))
        probes.stream.request_layer(layer)
        placed = probes.in_device_memory(it)
        for each in filter(None, (it, placed)):
            probes.ops.emit.upload_tokens(each)
        machine.drain()
        emit = Recording(self._engine, serial=True)
        for _ in range(_HOLDING):
            emit.experts(in_front, layer, probes.stream.experts(layer))
        chain(emit, it, layer)
        emit.look_up(it)  # when it is launched, the one before it has been
        holding, launched = emit.tickets[:_HOLDING], emit.tickets[_HOLDING:]
        while launched[-1].state not in (TicketState.ISSUED, TicketState.DONE):
            time.sleep(_LOOK_EVERY_S)
            machine.now()
        machine.now()
        begun_s, in_time = [ticket.started_s for ticket in launched], not holding[-1].done
        machine.wait(launched[-1])
        probes.stream.cancel_all()
        machine.drain()
        took_s = [after - before for before, after in pairwise(begun_s)]  # type: ignore[operator]  # all began
        return list(zip(launched, took_s, strict=False)) if in_time else []

    def _beside_experts(self, emit: Emitter, it: InFlight, layer: int) -> None:
        probes, engine = self._probes, self._engine
        part = partial(probes.stream.part, layer)
        emit.look_up(it)
        emit.attention_in(it, layer, part("attention_in"))
        emit.prefill_attention(it, layer)
        if probes.fits_staging(it):
            emit.attend_on_device(it, layer, range(len(it.batch.decode)), probes.staging)
        if (placed := probes.in_device_memory(it)) is not None:
            probes.attend_in_device_memory(emit, placed, layer)
        emit.attention_out(it, layer, part("attention_out"))
        probes.predict(emit, it, layer, part("attention_out"))
        emit.combine(it, layer)
        head = engine.resident.head
        emit.submit(GPU, compute.Head(engine.family, engine.spec, it.batch, it.acts, head))

    def _experts(self, emit: Emitter, it: InFlight, layer: int) -> None:
        experts = self._probes.stream.experts(layer)
        for number, part in islice(experts.items(), _EXPERTS):
            self._probes.experts(emit, it, layer, {number: part})
        emit.experts(it, layer, experts)


def _longest(max_tokens: int) -> Shape:
    return Shape(prompts=(min(_PROMPT_TOKENS, max_tokens),) * max(1, max_tokens // _PROMPT_TOKENS))


def _seconds(ticket: Ticket) -> float:
    assert ticket.started_s is not None and ticket.finished_s is not None
    return ticket.finished_s - ticket.started_s
