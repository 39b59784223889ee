"""What became of a copy request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kernels import _mover_arguments as check

if TYPE_CHECKING:
    from kernels.mover import DataMover


class CopyError(RuntimeError):
    """A copy failed, was cancelled, or its mover was closed; the text says which."""


class PacketSpan(NamedTuple):
    """One packet on the link; `number` counts the mover's packets in the order of their start, times are monotonic().

    On a CUDA stream a packet starts when it was launched, its event came, and the one before it was over; times are
    seen from the host, some 10 us late.
    """

    number: int
    num_bytes: int
    start_s: float
    finish_s: float


class CopyTicket:
    """Returned by `DataMover.submit`. Its values are those of the moment they are read; usable from any thread."""

    def __init__(self, mover: DataMover, handle: Any, *, num_bytes: int, urgent: bool) -> None:
        self._mover = mover  # a ticket that somebody waits for keeps its mover at work
        self._handle = handle
        self.num_bytes = num_bytes
        self.urgent = urgent

    def __repr__(self) -> str:
        return f"CopyTicket({self.num_bytes} bytes, {'urgent' if self.urgent else 'normal'}, {self.state})"

    @property
    def state(self) -> str:
        """One of "waiting", "started" and, settled, "done", "failed", "cancelled"."""
        return self._handle.state()

    @property
    def done(self) -> bool:
        """Settled, well or not: the mover does not use the tensors any more."""
        settled = self.state not in ("waiting", "started")
        if settled:
            self._mover.let_go()
        return settled

    @property
    def error(self) -> str | None:
        """Why the request failed or will (packets that the link has end first); None without a failure."""
        if self.state == "cancelled":
            return "the copy was cancelled"
        return self._handle.error() or None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all bytes have arrived; other Python threads run meanwhile.

        `CopyError` when the request failed, was cancelled or its mover closed; TimeoutError after `timeout_s`.
        """
        self._wait(timeout_s, issued=False)

    def wait_issued(self, timeout_s: float | None = None) -> None:
        """CUDA: return when the last copy and `record_event` stand in the stream, so that others can wait.

        A wait for `record_event` before that would see its previous recording. The stream's own wait for `wait_event`
        stands before the copies: that event may be recorded again from here on. On host memory the same as `wait`.
        Errors as in `wait`.
        """
        self._wait(timeout_s, issued=True)

    def cancel(self) -> bool:
        """Take the request out if none of its packets has started: no byte is moved, no event recorded, `wait` raises.

        False: it has started, and then runs to its end, or was settled already.
        """
        return self._handle.cancel()

    def spans(self) -> list[PacketSpan]:
        """Its packets that have arrived, in the order of their start."""
        return [PacketSpan(*values) for values in self._handle.spans()]

    @property
    def started_s(self) -> float | None:
        """When the link began its first packet, known once a packet has arrived; time.monotonic()'s clock."""
        return min((span.start_s for span in self.spans()), default=None)

    @property
    def finished_s(self) -> float | None:
        """When it was settled: for a copy that went well, when its last byte arrived."""
        return self._handle.finished_s() if self.done else None

    @property
    def submitted_s(self) -> float:
        return self._handle.submitted_s()

    @property
    def num_packets_waited(self) -> int | None:
        """Packets that the link had when this was submitted or started after that, before this one's first packet.

        At most the mover's `depth` for an urgent request that is not behind others of its class. None before a packet
        has arrived.
        """
        spans = self.spans()
        return spans[0].number - self._handle.num_finished_before() if spans else None

    def _wait(self, timeout_s: float | None, *, issued: bool) -> None:
        if timeout_s is not None:
            check.seconds("timeout_s", timeout_s)
        over = self._handle.wait(-1.0 if timeout_s is None else timeout_s, issued)
        self._mover.let_go()
        if (error := self.error) is not None and (over or self.done):
            raise CopyError(error)
        if not over:
            raise TimeoutError(f"{self} was not {'issued' if issued else 'done'} within {timeout_s} s")
