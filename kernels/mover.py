"""The data mover: copies of many regions in packets, on threads of its own, urgent ones first.

A request names regions, `dsts[i]` <- `srcs[i]`, and is cut into packets of `packet_bytes`. Requests of a class (normal
or urgent) start in the order they were submitted; between two packets, urgent ones go first. With host memory on both
sides the mover plays a link (at `rate_bytes_s`, or as fast as memory allows); with a CUDA device it feeds two streams.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from kernels import _mover_arguments as check
from kernels._extension import native
from kernels.mover_ticket import CopyError, CopyTicket, PacketSpan

__all__ = ["ClassCounters", "CopyError", "CopyTicket", "DataMover", "PacketSpan", "Staging"]

_EXIT_TIMEOUT_S = 10.0
_never_freed: list[_Held] = []  # by movers that failed, or whose link did not end: it may still write these tensors

_MAX_PACKET_BYTES = 1 << 40  # as well of all staging slots together
_MAX_COUNT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Pageable memory goes through pinned slots: a packet is copied to its slot while the link carries another one.

    `num_slots` of the mover's `packet_bytes` for each of the two classes, filled by `num_threads` threads. An urgent
    request waits at most for the `num_slots` packets that have slots already (for `num_threads` - 1 more with several
    staging threads).
    """

    num_slots: int = 2
    num_threads: int = 1


@dataclass(frozen=True, kw_only=True)
class ClassCounters:
    """What one class has carried since the mover started; `busy_s` counts time with any of its packets under way."""

    num_requests: int
    num_done: int
    num_failed: int
    num_cancelled: int
    num_packets: int
    num_bytes: int
    busy_s: float


class DataMover:
    """Copies between tensors in the background. Usable from any thread; a context manager that closes on exit.

    `device`: "cpu" (both sides in host memory) or a CUDA device, whose runtime library is found when the mover is made
    (`cuda_runtime`: its path, for unusual places). `depth`: packets of a class that the link may have at once; an
    urgent request waits for at most these. `rate_bytes_s`: an emulated link's speed, kept by absolute deadlines; 0:
    unpaced. A thread that was held up makes up for `catch_up_s` at most, so over any time t the link carries no more
    than rate * (t + catch_up_s) and the packets in flight. `num_threads`: threads that copy (host memory), at most
    `depth`. `cores`: none, or one core for each of these threads, then for each staging thread; on a CUDA device the
    launching thread takes the first.

    ValueError names a bad argument; RuntimeError: no CUDA runtime, or it refused the device.
    """

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        packet_bytes: int = 1 << 20,
        depth: int = 2,
        rate_bytes_s: float = 0.0,
        catch_up_s: float = 0.05,
        num_threads: int = 1,
        cores: Sequence[int] = (),
        staging: Staging | None = None,
        cuda_runtime: str | None = None,
    ) -> None:
        self.device = check.device("device", device)
        self.packet_bytes, self.depth, self.rate_bytes_s = packet_bytes, depth, rate_bytes_s
        self.staging = staging
        check.positive("packet_bytes", packet_bytes, at_most=_MAX_PACKET_BYTES)
        check.positive("depth", depth, at_most=_MAX_COUNT)
        check.copy_threads(self.device, num_threads, depth)
        check.rate(self.device, rate_bytes_s)
        check.seconds("catch_up_s", catch_up_s)
        num_slots, num_stagers = (staging.num_slots, staging.num_threads) if staging else (0, 0)
        if staging:
            num_slots_that_fit = _MAX_PACKET_BYTES // (2 * packet_bytes)
            check.positive("staging.num_slots", num_slots, at_most=min(_MAX_COUNT, max(1, num_slots_that_fit)))
            check.positive("staging.num_threads", num_stagers, at_most=_MAX_COUNT)
        check.cores("cores", cores, num_threads, num_stagers)
        index = self.device.index if self.device.type == "cuda" else -1
        self._native = native().Mover(
            packet_bytes, depth, rate_bytes_s, catch_up_s, num_threads, num_slots, num_stagers, list(cores),
            index, cuda_runtime or "",
        )  # fmt: skip
        self._held, self._owner = _Held(), os.getpid()
        # Runs when the mover is garbage or the interpreter ends; until then it holds the tensors.
        self._finalizer = weakref.finalize(self, _close, self._native, self._held, self._owner, _EXIT_TIMEOUT_S)

    def submit(
        self,
        dsts: Sequence[torch.Tensor],
        srcs: Sequence[torch.Tensor],
        *,
        urgent: bool = False,
        wait_event: int = 0,
        record_event: int = 0,
    ) -> CopyTicket:
        """Copy each of `srcs` to the tensor at the same place of `dsts`; returns at once.

        Pairs are contiguous and of equal dtype and shape; no destination shares memory with another tensor of the
        request. The mover holds the tensors until the request is settled; until then nobody else may write any of them,
        nor read a destination. Requests that are under way together must not depend on each other except through
        tickets or events: only the order in which they start is kept.

        CUDA only, as integers (`torch.cuda.Event.cuda_event`): nothing is copied before `wait_event`, recorded before
        this call and not again before `CopyTicket.wait_issued` has returned (in the state "started" the stream may not
        wait for it yet), and `record_event` is recorded behind the last byte. Another stream may wait for it after
        `CopyTicket.wait_issued`. Events must exist until the request is settled.

        Copies run on streams of the mover's own, which wait for nothing but `wait_event`: not for kernels launched
        before this call, such as those that write a source, fill a new destination, or last used the memory that
        torch's allocator has now given to it. Where there are any, record an event behind them for `wait_event`.

        ValueError or TypeError names a bad argument; RuntimeError: the mover was closed or has failed.
        """
        check.request(self.device, dsts, srcs, staged=self.staging is not None)
        check.events(self.device, wait_event=wait_event, record_event=record_event)
        addresses = [t.data_ptr() for t in dsts], [t.data_ptr() for t in srcs], [t.nbytes for t in srcs]
        check.disjoint(*addresses)
        entry = _Entry((*dsts, *srcs))
        try:
            self._held.add(entry, urgent)
            self._native.submit(entry, *addresses, urgent, wait_event, record_event)
        except BaseException:
            if entry.ticket is None:
                self._held.discard(entry, urgent)
            raise
        self.let_go()
        return CopyTicket(self, entry.ticket, num_bytes=sum(addresses[2]), urgent=urgent)

    def let_go(self) -> None:
        """Release the tensors of settled requests; submitting, waiting and asking a ticket for `done` do so too."""
        self._held.drop_settled(self._native)

    def counters(self) -> dict[str, ClassCounters]:
        """What was carried so far, under "normal" and "urgent"."""
        names = ClassCounters.__dataclass_fields__
        return {
            name: ClassCounters(**dict(zip(names, values, strict=True)))
            for name, values in zip(("normal", "urgent"), self._native.counters(), strict=True)
        }

    @property
    def pinned_bytes(self) -> int:
        """Memory of the staging slots, of both classes."""
        return 2 * self.staging.num_slots * self.packet_bytes if self.staging else 0

    @property
    def closed(self) -> bool:
        """Takes no more requests: closed, or failed as a whole."""
        return self._native.stopped()

    def close(self, timeout_s: float = _EXIT_TIMEOUT_S) -> bool:
        """Stop after the packets that the link has; requests with anything left to start fail with `CopyError`.

        False when the link did not end in time (a CUDA event that never comes): all requests have failed, and their
        tensors are kept for the life of the process, since the device may still write them. Idempotent.
        """
        check.seconds("timeout_s", timeout_s)
        ended = _close(self._native, self._held, self._owner, timeout_s)
        self._finalizer.detach()
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(eq=False, slots=True)
class _Entry:
    """A request's tensors; `ticket` is the native one, set in the call that submits: None says nothing is under way."""

    tensors: tuple[torch.Tensor, ...]
    ticket: Any = None


class _Held:
    """Tensors of requests that are not settled, which nobody else need hold; guarded, since any thread may submit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: tuple[deque[_Entry], deque[_Entry]] = (deque(), deque())

    def add(self, entry: _Entry, urgent: bool) -> None:
        """Before the request is submitted: from then on the link may write the tensors."""
        with self._lock:
            self._queues[urgent].append(entry)

    def discard(self, entry: _Entry, urgent: bool) -> None:
        with self._lock:
            if entry in self._queues[urgent]:
                self._queues[urgent].remove(entry)

    def drop_settled(self, mover: Any) -> None:
        """Lets go of settled ones: of the head only, since requests of a class end nearly in their order.

        A mover that gives up says so before it settles requests that the link still has: `failed` is read last.
        """
        with self._lock:
            for queue in self._queues:
                while queue and queue[0].ticket and queue[0].ticket.settled() and not mover.failed():
                    queue.popleft()

    def clear(self) -> None:
        with self._lock:
            for queue in self._queues:
                queue.clear()


def _close(mover: Any, held: _Held, owner: int, timeout_s: float) -> bool:
    if os.getpid() != owner:  # a forked child: the mover is its parent's
        return True
    _never_freed.append(held)  # first: whatever interrupts this leaves no copy without a holder
    ended: bool = mover.close(timeout_s)
    if ended and not mover.failed():
        held.clear()
        _never_freed.remove(held)
    return ended
