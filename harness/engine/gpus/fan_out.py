"""Run a step of the emitter on all GPUs that have a micro-batch: one emitter keeps another one for each other GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, Self, TypeVar

from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.machine.base import HOST_KINDS, LANES, Lane, Op, Ticket

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound="FanOut")


class FanOut:
    """Submits ops to the lanes of an engine's GPUs. `Emitter` explains `serial` and `fifo`."""

    def __init__(self, engine: Engine, *, serial: bool = False, fifo: bool = False) -> None:
        self._engine = engine
        self._spec, self._family = engine.spec, engine.family
        self._serial, self._fifo = serial, fifo
        self._lanes = {
            lane: lane if lane.kind in HOST_KINDS else Lane(lane.kind, engine.rank) for lane in LANES if engine.rank
        }
        self.tail: tuple[Ticket, ...] = ()  # what was submitted last
        self.behind: tuple[Ticket, ...] = ()  # what every op follows that this GPU submits, until something else is set
        self._gpu = 0  # number among all GPUs of the engine

    @cached_property
    def _gpus(self) -> list[Self]:
        """The emitters of all GPUs: this one, and one for each other GPU."""
        others = [type(self)(peer, serial=self._serial, fifo=self._fifo) for peer in self._engine.peers]
        for number, emit in enumerate(others, start=1):
            emit._gpu = number
        return [self, *others]

    def submit(self, lane: Lane, op: Op, *, urgent: bool = False) -> Ticket:
        """Submit an op of one GPU: `lane` is one of rank 0, and the op goes to this GPU's lane of the same kind."""
        lane = self._lanes[lane] if self._lanes else lane
        ticket = self._engine.machine.submit(lane, op, after=self._after, urgent=urgent and not self._fifo)
        self.tail = (ticket,)
        return ticket

    @property
    def _after(self) -> tuple[Ticket, ...]:
        return (*self.tail, *self.behind) if self._serial else self.behind

    def _mine(self, value: T | list[T]) -> T:
        """Return this GPU's value of an argument that is either the same for all, or a list with one for each GPU."""
        return value[self._gpu] if isinstance(value, list) else value

    def _each(self, gpus: Iterable[int], run: Callable[[Self], R]) -> list[R]:
        """Run a step on some GPUs side by side: each follows what was submitted before, the next step follows all."""
        before, results = self.tail, []
        after: dict[Ticket, None] = {}  # an ordered set
        for gpu in gpus:
            emit = self._gpus[gpu]
            emit.tail = before
            results.append(run(emit))
            after |= dict.fromkeys(emit.tail)
        for emit in self._gpus:
            emit.tail = tuple(after)
        return results


Step = Callable[Concatenate[F, InFlight, P], R]


def on_each_gpu(step: Step[F, P, R]) -> Step[F, P, R]:
    """Make a step that is written for one GPU a step of all GPUs that have the micro-batch; it returns the first GPU's
    result."""

    @wraps(step)
    def fanned(emit: F, it: InFlight, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not it.gpus and it.gpu == emit._gpu:
            return step(emit, it, *args, **kwargs)
        by_gpu = {mine.gpu: mine for mine in it.gpus or (it,)}
        return emit._each(by_gpu, lambda each: step(each, by_gpu[each._gpu], *args, **kwargs))[0]

    return fanned


def on_one_gpu(step: Step[F, P, R]) -> Step[F, P, R]:
    """Make a step as `on_each_gpu` does, but run it on the first GPU alone where the GPUs share the micro-batch. All of
    them then have the same hidden states and the same choices of the router."""
    fanned = on_each_gpu(step)

    @wraps(step)
    def chosen(emit: F, it: InFlight, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not it.is_shared:
            return fanned(emit, it, *args, **kwargs)
        return emit._each([0], lambda first: step(first, it.gpus[0], *args, **kwargs))[0]

    return chosen
