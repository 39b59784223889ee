"""Define the contract between a strategy and a machine: typed ops submitted to lanes, tickets, and nothing else.

A strategy never touches a stream, a thread, a clock's source or a tensor's device. Every machine (`emulated`,
`shuffled`, `simulated`, `cuda`) implements `Machine`; the derivation of data dependencies and the two FIFO
classes of a lane are shared (`hazards.py`, `queues.py`), so that an op means the same thing everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from harness.config import require
from kernels.triton import KERNELS

if TYPE_CHECKING:
    from harness.memory.tiers import Buffer, Tier


class LaneKind(StrEnum):
    GPU = "gpu"
    CPU = "cpu"
    H2D = "h2d"
    D2H = "d2h"
    PIN = "pin"  # pageable -> pinned staging copies

    __hash__ = str.__hash__  # an enum's own is several times slower, and lanes are looked up with every op


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """A lane runs ops of one kind, one after another, for one rank."""

    kind: LaneKind
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.rank}" if self.rank else str(self.kind)


LANES = GPU, CPU, H2D, D2H, PIN = tuple(Lane(kind) for kind in LaneKind)  # of one GPU and its host
HOST_KINDS = (LaneKind.CPU,)  # the host is one, however many GPUs there are: its lane is rank 0's


class Work(NamedTuple):
    """The cost of an op to the hardware: FLOPs, and bytes moved by tier. It feeds cost tables and the pacing of a lane.

    Work is a named tuple because it is made with every op, and a frozen dataclass takes twice as long to make.
    """

    flops: float = 0.0
    device_bytes: float = 0.0  # device memory traffic
    host_bytes: float = 0.0  # host memory traffic
    link_bytes: float = 0.0  # over the host-device link; copied into pinned memory; on a gpu lane, between GPUs


class Context(Protocol):
    """The things that a running op may use: tensors over planned buffers, and the lane's copy engine.

    An op of a copy lane reaches memory of the device only through `copy`, `move` and `host_value`: they may return
    before their bytes have moved.
    """

    lane: Lane

    def memo(self, buffer: Buffer) -> dict[Hashable, Any]:
        """Return a dictionary for what ops derive from a buffer's memory once and want again, such as views; it is gone
        with the memory."""

    def tensor(self, buffer: Buffer, shape: Sequence[int], dtype: str) -> Any:
        """Return a torch view of the buffer's first bytes."""

    def copy(self, dst: Buffer, src: Buffer, offset_bytes: int, nbytes: int) -> None:
        """Copy a byte range of `src` to the same range of `dst` at the speed of this lane."""

    def move(self, dst: Any, src: Any) -> None:
        """Copy tensor (or numpy array) `src` into tensor `dst`, any strides, at the speed of this lane."""

    def gather(self, dst: Any, caches: Sequence[Any], tables: Any, lengths: Any) -> None:
        """Copy sequences out of paged caches in host memory to `dst`, at the speed of this lane. The other arguments
        are those of `kernels.kv_gather`, with `tables` and `lengths` on the host."""

    def host_value(self, source: Any) -> Any:
        """Return a numpy copy of a tensor, moved at the speed of this lane: this is how values reach the strategy. An
        op returns the copy, or what holds it, and does not look at it: it may be filled only when the op is over."""

    def num_threads(self) -> int:
        """Return the number of host threads that kernels of this lane may use."""


class Op(ABC):
    """An op is one typed unit of work on a lane. Subclasses are data: what they touch is declared, never captured in a
    closure.

    `reads` and `writes` are hashable keys (buffers, KV partitions); the machine derives all ordering from them.
    `packets` > 1 lets an urgent op run between two packets; `run` is called once a packet and the last call's result is
    the op's value. Only ops on a d2h lane may return a value, and those also `imagine` it.

    An op may be several equal `pieces` of work, one after another with equally many of the packets. Where costs are
    modelled each piece costs what an op of its own would, its submission and its start included.
    """

    kind: ClassVar[str] = "op"
    layer: int | None = None
    micro_batch: int | None = None
    reads: tuple[Hashable, ...] = ()
    writes: tuple[Hashable, ...] = ()
    packets: int = 1
    pieces: int = 1
    launches: int = 1  # the ops of their own for which it stands, run in one; known when `work` is
    has_fixed_work: ClassVar[bool] = False  # `work` is the same however often the op is submitted

    @abstractmethod
    def work(self) -> Work:
        """Return the cost of the whole op (all packets). An op without one would be free on the simulated machine. What
        depends on values that no host has seen may be an expectation, until `run` knows better."""

    @property
    def cost_key(self) -> str:
        """The name by which calibration tables know this op: ops of one key cost a function of their
        `cost_features`."""
        return self.kind

    def cost_features(self) -> tuple[float, ...]:
        """Return what the duration of the op, or of one of its pieces or launches, depends on. Tables of measured costs
        ask for it; it is empty where only `work` is known."""
        return ()

    @property
    def joined(self) -> int:
        """The number of ops, as tables of costs know them, whose work it does: its launches, or more where a device
        does several in one."""
        return self.launches

    def launch_works(self) -> Sequence[Work]:
        """Return the work of each launch, asked only where there are several: together they are `work`."""
        return [Work(*(amount / self.launches for amount in self.work()))] * self.launches

    def run(self, ctx: Context, packet: int) -> Any:
        """Execute packet number `packet` on a real machine."""
        raise TypeError(f"op {self.kind} has no real execution")

    def imagine(self, world: Any) -> Any:
        """Return the value that `run` would bring to the host, where no tensors exist (the simulated machine)."""
        return None

    def foresee(self, world: Any) -> None:
        """Take from `world` what `work` depends on and nobody has told the op, such as the tokens of each expert. Asked
        once, at submission, where no tensors exist."""

    def run_packet(self, ctx: Context, packet: int) -> Any:
        """Run a packet, for machines. Raises TypeError for a value that the op's class cannot `imagine`."""
        value = self.run(ctx, packet)
        if value is not None and type(self).imagine is Op.imagine:
            raise TypeError(f"op {self.kind} brings a value, so it must define imagine() for the simulated machine")
        return value

    def __str__(self) -> str:
        where = "" if self.layer is None else f" layer {self.layer}"
        batch = "" if self.micro_batch is None else f" mb {self.micro_batch}"
        return f"{self.kind}{where}{batch}"


class TicketState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    ISSUED = "issued"  # all of it stands in a device's stream, where others can wait for it
    DONE = "done"
    CANCELLED = "cancelled"


_PENDING, _DONE, _CANCELLED = TicketState.PENDING, TicketState.DONE, TicketState.CANCELLED


class Ticket:
    """A ticket follows a submitted op to its end. `done`, `started_s` and `finished_s` are as of the last `wait`,
    `wait_any` or `now`.

    Written out, with containers only where there is something in them: a simulated run makes millions. A settled ticket
    refers to no other, so that whatever the strategy has let go of is gone.
    """

    __slots__ = (
        "dependents", "done", "finished_s", "inherited", "lane", "num_unmet", "number", "op", "packets_run", "place",
        "stamp", "started_s", "state", "urgent", "value", "waits_for",
    )  # fmt: skip

    def __init__(self, op: Op, lane: Lane, number: int, urgent: bool) -> None:
        self.op = op
        self.lane = lane
        self.number = number
        self.urgent = urgent
        self.done = False
        self.started_s: float | None = None
        self.finished_s: float | None = None
        # What follows belongs to the machine.
        self.state = _PENDING
        self.value: Any = None
        self.packets_run = 0
        self.num_unmet = 0  # dependencies not finished yet
        self.waits_for: Sequence[Ticket] = ()  # those that were unfinished at submission; empty once none is left
        self.dependents: list[Ticket] | None = None
        self.inherited: tuple[Ticket, ...] = ()  # a cancelled ticket's own dependencies, passed on to its followers
        self.stamp = -1  # number of the submission that looked at this ticket last
        self.place: Any = None  # where the machine keeps what else it knows

    @property
    def unmet(self) -> set[Ticket]:
        """The dependencies that are neither done nor cancelled."""
        return {dependency for dependency in self.waits_for if not dependency.settled}

    @property
    def ready(self) -> bool:
        return not self.num_unmet

    @property
    def settled(self) -> bool:
        return self.state is _DONE or self.state is _CANCELLED

    def __str__(self) -> str:
        return f"#{self.number} {self.op} on {self.lane}{' urgent' if self.urgent else ''}"


@dataclass(frozen=True, slots=True)
class Span:
    """A span records one packet as it ran. Times are seconds on the machine's clock; `cpu_s` is the thread's own
    processor time."""

    lane: Lane
    kind: str
    layer: int | None
    micro_batch: int | None
    ticket: int
    packet: int
    num_packets: int
    urgent: bool
    start_s: float
    end_s: float
    cpu_s: float
    work: Work  # this packet's share


def require_watchdog_s(watchdog_s: float) -> None:
    """Refuse a watchdog without time: a machine's Config asks this of its `watchdog_s`."""
    require(watchdog_s > 0, "watchdog_s", f"must be > 0, got {watchdog_s}")


def require_kernels(names: Iterable[str]) -> None:
    """Refuse GPU kernels that do not exist: a machine's Config asks this of its `triton`."""
    told = f"must be some of {', '.join(KERNELS)}, got {', '.join(names)}"
    require(set(names) <= set(KERNELS), "triton", told)


class MachineError(RuntimeError):
    """A run cannot go on: an op failed, or nothing can make progress any more."""


# Of the time of an op's kind on a kind of lane, the share whose cost is an estimate; kinds without are left out.
EstimatedShares = Mapping[tuple[LaneKind, str], float]


GpuKernels = frozenset[str] | None  # of `kernels.triton.KERNELS`


class Machine(ABC):
    """See the module text. `label` goes on every number that comes from this machine."""

    label: ClassVar[str]
    name: ClassVar[str]
    clock: ClassVar[Literal["host", "virtual", "none"]] = "host"  # whose seconds `now` and spans are; none: no seconds
    launches_ahead: ClassVar[bool] = False  # ops of the gpu lane are put into a stream before they can begin
    warms_up: ClassVar[bool] = False  # first uses take longer: engines see to them before the first pass
    tiers: dict[str, Tier]
    gpu_kernels: GpuKernels = None  # those that do the gpu lane's work, torch all else; None: no GPU does it
    poisons: bool = False  # buffers are filled with NaN when acquired and when released
    spans: MutableSequence[Span]
    link_ceilings_gb_s: Mapping[str, float] | None = None  # measured by the machine; None: the profile's hold
    host_bytes_s: float | None = None  # of host memory, shared by all that use it; None: unknown, or no limit
    world: Any = None  # where no tensors exist: what `Op.imagine` asks for values
    in_pass: bool = False  # the engine's loop says: a pipeline submits a pass

    @abstractmethod
    def submit(self, lane: Lane, op: Op, *, after: Iterable[Ticket] = (), urgent: bool = False) -> Ticket:
        """Queue `op` on `lane`; never blocks. `after` is for order that is not about data."""

    @abstractmethod
    def wait(self, ticket: Ticket) -> Any:
        """Block until the op ran, and return its value. Raises MachineError naming the op if any op failed."""

    @abstractmethod
    def wait_any(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Block until at least one has finished, and return all that have, in the order they finished. Cancelled ones
        count."""

    @abstractmethod
    def cancel(self, ticket: Ticket) -> bool:
        """Withdraw an op that has not started and that nothing depends on; False where that is too late."""

    @abstractmethod
    def now(self) -> float:
        """Return seconds on the machine's clock. Raises MachineError as `wait` does, so that polling ends too."""

    @property
    def facts(self) -> dict[str, str]:
        """The other facts that a reader of this machine's numbers must know; they go into the summary."""
        return {}

    @property
    def estimated_shares(self) -> EstimatedShares | None:
        """Return what costs are estimates among measured ones; None where an op's time is its own or all follow
        from stated rates."""
        return None

    @abstractmethod
    def back(self, buffer: Buffer) -> None:
        """Provide memory for a newly reserved root buffer (no-op where no tensors exist)."""

    @abstractmethod
    def unback(self, buffer: Buffer) -> None:
        """Give the memory of a released root buffer back."""

    def peak_temporaries_bytes(self) -> int | None:
        """Return the most device memory that ops have taken since the last call beside all buffers; None where no
        device tells. All ops submitted until now have been waited for."""
        return None

    def spend_host_time(self, num_sequences: int) -> None:
        """Spend the time in which the strategy's thread schedules, lays out and retires a pass of so many sequences.
        Where time is real it passes by itself; a virtual clock is told here."""

    def drain(self) -> None:
        """Wait until every submitted op has finished."""

    def close(self) -> None:
        """Stop all lanes; safe to call twice, and after an error."""
