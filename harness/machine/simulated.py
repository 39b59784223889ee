"""The simulated machine: a virtual clock, lanes that cost what a cost model says, and one shared host memory.

No tensors: ops are never run, only asked for their work and for the value they would bring to the host. While several
lanes are active together they share host-memory bandwidth (`contention.py`). Same configuration and seed, same
schedule, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, ClassVar, Literal, Protocol

from harness.config import config, require
from harness.hardware.profile import HardwareConfig, MemorySharing
from harness.machine.base import (
    EstimatedShares,
    Lane,
    LaneKind,
    Machine,
    MachineError,
    Op,
    Ticket,
    TicketState,
    require_kernels,
)
from harness.machine.hazards import Hazards
from harness.machine.queues import dump, withdraw
from harness.machine.virtual.contention import Contention, MeasuredTogether, SharedMemory
from harness.machine.virtual.costs import Costs, LaneCost, MeasuredCosts, Roofline
from harness.machine.virtual.span_log import SpanLog, Totals, TotalsByKind
from harness.machine.virtual.world import host_bytes_s, profile_costs
from harness.memory.tiers import Buffer, make_tiers
from harness.model.spec import ModelSpec
from kernels.simulation import virtual_lanes

_MAX_IDLE_POLLS = 10_000


class HostTimes(Protocol):
    """The seconds that the strategy's thread and its wake-ups take.

    They are for a submission, a wake-up, a pass, and each sequence in it; until a lane that had nothing to do begins
    with an op that has become ready, while no other lane runs anything and while one does; and, by kind of lane, from
    one of its ops to the next.
    """

    @property
    def handover_s(self) -> float: ...
    @property
    def handover_beside_s(self) -> float: ...
    @property
    def turns_s(self) -> Mapping[str, float]: ...
    @property
    def submit_s(self) -> float: ...
    @property
    def wake_s(self) -> float: ...
    @property
    def pass_s(self) -> float: ...
    @property
    def sequence_s(self) -> float: ...


class SimulatedMachine(Machine):
    """The simulated machine runs ops in virtual time, which moves only inside `wait`, `wait_any`, `now`, `cancel` and
    `drain`.

    Of `contention` and `host_bytes_s` (short for plain max-min fairness) exactly one is given. With `keep_spans` at
    "totals" only sums by lane and kind of op are kept (`totals`), for runs whose spans would fill the memory.

    The event loop, the two FIFO classes of its lanes and both clocks, the strategy's and that of the lanes (which is
    never ahead while the strategy runs), are `_lanes`. It reads and writes the fields of tickets itself.
    """

    label: ClassVar[str] = "simulated"
    name: ClassVar[str] = "simulated"
    clock = "virtual"

    def __init__(
        self,
        *,
        capacities_bytes: dict[str, int],
        costs: Costs | Roofline,
        host_bytes_s: float | None = None,
        contention: Contention | None = None,
        world: Any = None,
        submit_s: float = 0.0,
        wake_s: float = 0.0,
        keep_spans: Literal["all", "totals"] = "all",
    ) -> None:
        assert (host_bytes_s is None) != (contention is None), "lanes share memory in one way"
        self.tiers = make_tiers(capacities_bytes)
        self.spans = log = SpanLog(keeps_rows=keep_spans == "all")
        self._hazards, self._lane_names = Hazards(), list[Lane]()  # lanes by id
        self._lanes = virtual_lanes(
            log.native,
            ticket_type=Ticket,
            running=TicketState.RUNNING,
            done=TicketState.DONE,
            cancelled=TicketState.CANCELLED,
            imagine=Op.imagine,
            foresee=Op.foresee,
            machine_error=MachineError,
            dependencies=self._hazards.native,
            hazards=self._hazards,
            keys=self._hazards.keys,
            lanes=self._lane_names,
        )
        self._submit = self._lanes.submit
        self._num_idle_polls = 0
        self._pass_s = self._sequence_s = 0.0
        self.thinking_s = 0.0  # for which the strategy's thread works on after each wait within a pass
        self._measured: MeasuredCosts | None = None
        log.name(self._lane_names, self._lanes.kinds())
        self._take(costs, contention or SharedMemory(host_bytes_s or 0.0))
        self._lanes.host_times(submit_s, wake_s, 0.0, 0.0)
        self.world = world

    def calibrate(
        self, costs: MeasuredCosts, together: Mapping[str, Mapping[str, float]], host: HostTimes,
        *, launches_ahead: bool = False,
    ) -> None:  # fmt: skip
        """Take measured costs, slow-downs of lanes together ("cpu+gpu": {"gpu": 1.1}) and host times instead of the
        profile's; before the first op. With `launches_ahead` ops of gpu lanes are launched before they can begin, and
        costs may be an op's own seconds and those that the host takes to launch it."""
        assert not self._lanes.num_submitted, "ops have run already"
        self._measured = costs
        self._take(costs, MeasuredTogether.of_slowdowns(together))
        self._lanes.host_times(host.submit_s, host.wake_s, host.handover_s, host.handover_beside_s)
        self._lanes.turns({kind: s for kind, s in host.turns_s.items() if kind != LaneKind.GPU or not launches_ahead})
        if launches_ahead:
            self._lanes.launch_ahead(str(LaneKind.GPU))
        self._pass_s, self._sequence_s = host.pass_s, host.sequence_s

    def _take(self, costs: Costs | Roofline, contention: Contention) -> None:
        if isinstance(costs, Roofline):
            self._lanes.cost_rates(
                {kind: astuple(cost) for kind, cost in costs.lanes.items()},
                {kinds: astuple(cost) for kinds, cost in costs.ops.items()},
            )
        else:
            self._lanes.cost_function(costs.seconds)
        self._lanes.share(contention.native)
        self.contention = contention
        self.host_bytes_s = contention.host_bytes_s if isinstance(contention, SharedMemory) else None

    @property
    def facts(self) -> dict[str, str]:
        kinds = ", ".join(f"{lane} {kind}" for lane, kind in sorted(self.estimated_shares or ()))
        estimated = {"not measured": f"{kinds} (estimated by their lanes' measured rates)"} if kinds else {}
        world = self.world
        routing = {"routing": world.source} if world is not None else {}
        if world is not None and world.was_asked_to_predict:
            routing["predictions"] = world.prediction_source
        if self.thinking_s:
            routing["strategy's thread"] = f"{1e6 * self.thinking_s:.0f} us behind each wait of a pass"
        return {"memory_sharing": self.contention.name, **estimated, **routing}

    @property
    def estimated_shares(self) -> EstimatedShares | None:
        return None if self._measured is None else self._measured.estimated_shares

    def is_busy(self, kind: LaneKind) -> bool:
        """Tell whether a lane of this kind has an op to run at this moment of the virtual clock."""
        return bool(self._lanes.is_busy(kind))

    def strategy_left_s(self) -> float:
        """Return for how many seconds of the virtual clock the strategy's thread works on from now; 0 while it waits or
        wakes up."""
        return float(self._lanes.strategy_left_s())

    def spend_host_time(self, num_sequences: int) -> None:
        self._lanes.spend(self._pass_s + self._sequence_s * num_sequences)

    @property
    def world(self) -> Any:
        """The world that `Op.imagine` asks for values, and `Op.foresee` for what work depends on."""
        return self._world

    @world.setter
    def world(self, world: Any) -> None:
        self._world = self._lanes.world = world

    def submit(self, lane: Lane, op: Op, *, after: Iterable[Ticket] = (), urgent: bool = False) -> Ticket:
        self._num_idle_polls = 0
        ticket: Ticket = self._submit(lane, op, after, urgent)
        return ticket

    def keep_tape(
        self, ops: list[tuple[Lane, Op, tuple[int, ...], bool, int]], costs: list[tuple[Op, bool]]
    ) -> Callable[[], list[Ticket]]:
        """Return what submits these ops in one call, each time it is called, and returns their tickets.

        Each has the places in the list of those that it follows but for its keys, is urgent or not, and has a place in
        `costs`, or -1. There stands one op for all that have this place: their work, kind, pieces and lane are alike.
        Where rates say what they take it is asked for all, once for ever or, unless it is fixed, each time.
        """
        number = self._lanes.add_tape(ops, costs)

        def submit() -> list[Ticket]:
            self._num_idle_polls = 0
            tickets: list[Ticket] = self._lanes.submit_tape(number)
            return tickets

        return submit

    @contextmanager
    def noted(self) -> Iterator[list[tuple[Ticket, tuple[Ticket, ...]]]]:
        """Note the ticket of each op that is submitted meanwhile, with those that it was to follow."""
        found: list[tuple[Ticket, tuple[Ticket, ...]]] = []

        def note(lane: Lane, op: Op, after: Iterable[Ticket], urgent: bool) -> Ticket:
            followed = tuple(after)
            found.append((self._lanes.submit(lane, op, followed, urgent), followed))
            return found[-1][0]

        self._submit = note
        try:
            yield found
        finally:
            self._submit = self._lanes.submit

    def wait(self, ticket: Ticket) -> Any:
        self._run(self._lanes.wait_any([ticket]))
        if ticket.state is TicketState.CANCELLED:
            raise MachineError(f"waited for {ticket}, which was cancelled")
        self._think()
        return ticket.value

    def wait_any(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        assert tickets, "wait_any of nothing would never end"
        self._run(self._lanes.wait_any(list(tickets)))
        self._think()
        return sorted((t for t in tickets if t.settled), key=lambda t: (t.finished_s or 0.0, t.number))

    def cancel(self, ticket: Ticket) -> bool:
        self._lanes.catch_up()
        withdrawn = withdraw(ticket)
        if withdrawn:
            self._lanes.withdraw(ticket)
        return withdrawn

    def now(self) -> float:
        self._num_idle_polls += 1
        if self._num_idle_polls > _MAX_IDLE_POLLS:
            raise MachineError("polling: the clock stands still until something is awaited; use wait or wait_any")
        self._lanes.catch_up()
        return float(self._lanes.host_s)

    def drain(self) -> None:
        self._run(self._lanes.drain())

    def totals(self) -> TotalsByKind:
        """Return busy time and work by lane and kind of op since the spans were cleared, up to now. The difference of
        two calls is what happened between them. Work counts by the part of an op that is done, which differs from its
        part of the span's time while contention changes the op's speed."""
        self._lanes.catch_up()
        sums = self._lanes.totals()
        return {(self._lane_names[lane], kind): Totals(*values) for (lane, kind), values in sums.items()}

    def close(self) -> None:
        """Do nothing, since nothing runs between calls."""

    def back(self, buffer: Buffer) -> None:
        """Do nothing, since there are no tensors."""

    def unback(self, buffer: Buffer) -> None:
        """Do nothing, since there are no tensors."""

    def _think(self) -> None:
        if self.thinking_s and self.in_pass:
            self._lanes.spend(self.thinking_s)

    def _run(self, went_on: bool) -> None:
        self._num_idle_polls = 0
        if not went_on:
            lanes = ((self._lane_names[lane], waiting, running) for lane, waiting, running in self._lanes.pending())
            raise MachineError(f"deadlock: nothing runs and no op is ready.\n{dump(lanes)}")


@config
class Config:
    """The configuration's group `machine` has these settings where it is `simulated`. Host times are those of the
    strategy's own thread, in microseconds."""

    has_tensors: ClassVar[bool] = False

    submit_us: float = 0.0
    wake_us: float = 0.0
    memory_sharing: MemorySharing | None = None  # in place of the profile's
    triton: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("submit_us", "wake_us"):
            require(getattr(self, name) >= 0, name, f"must be >= 0, got {getattr(self, name)}")
        require_kernels(self.triton or ())


def build(config: Config, hardware: HardwareConfig, spec: ModelSpec) -> SimulatedMachine:
    """Build the profile's machine on a virtual clock, for a model of these dimensions. A calibrated profile has neither
    rates nor a memory that lanes share: `calibrate` brings both, as measured."""
    free = Roofline(lanes={kind: LaneCost() for kind in LaneKind})
    memory_bytes_s = float("inf") if hardware.calibrated else host_bytes_s(hardware)
    machine = SimulatedMachine(
        capacities_bytes=hardware.capacities_bytes,
        costs=free if hardware.calibrated else profile_costs(hardware, spec),
        contention=SharedMemory(memory_bytes_s, config.memory_sharing or hardware.memory_sharing),
        submit_s=config.submit_us * 1e-6,
        wake_s=config.wake_us * 1e-6,
    )
    machine.gpu_kernels = None if config.triton is None else frozenset(config.triton)
    return machine
