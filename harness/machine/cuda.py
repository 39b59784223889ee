"""The machine of a real GPU: lanes are CUDA streams, tickets are events, the cpu and pin lanes are host threads.

A thread a stream launches what is ready, and another one sleeps until its events come; the strategy's thread does
neither. An urgent op may gather what lies scattered in host memory while it is launched: launches of weights go on. An
op on one stream follows one on another by the stream's own wait; host lanes start when the event has come
(`device/issuing.py` says which is which). Nothing waits for the whole device; memory is taken while planning.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from harness.config import ConfigError, config, require
from harness.hardware.profile import HardwareConfig
from harness.machine import base
from harness.machine.base import D2H, GPU, H2D, Lane, LaneKind, MachineError, Op, Span, Ticket, Work
from harness.machine.device.clock import DeviceClock
from harness.machine.device.context import DeviceContext
from harness.machine.device.issuing import DEVICE_LANES, IssueBoard
from harness.machine.device.lanes import Depth, DeviceQueue, DeviceStream, Launched
from harness.machine.device.links import link_rates_gb_s
from harness.machine.device.memory import DeviceArenas
from harness.machine.device.numa import Node, node_of
from harness.machine.device.pinned import HostMemory, Progress
from harness.machine.device.runtime import DeviceError, DeviceRuntime, TorchCudaRuntime
from harness.machine.device.staging import StagingRing
from harness.machine.threads.context import HostContext
from harness.machine.threads.machine import ThreadedMachine, packet_work
from harness.model.spec import ModelSpec
from kernels import triton as gpu_kernels
from kernels.cpu import num_cores

_never_freed: list[object] = []  # memory of machines whose device did not come to rest: it may still be written
_COPY_LANES = (H2D, D2H)
_ROUNDING_BYTES = 256 << 20


@config
class Config:
    """The configuration's group `machine` has these settings where it is `cuda`."""

    has_tensors: ClassVar[bool] = True

    watchdog_s: float = 120.0
    poison: bool = False
    copies_in_flight: int = 2
    launch_mb: float = 64.0
    gpu_ops_in_flight: int = 16
    staging_mb: float = 8.0
    cpu_threads: int | None = None
    pin_threads: int = 4
    triton: tuple[str, ...] = gpu_kernels.KERNELS

    def __post_init__(self) -> None:
        base.require_watchdog_s(self.watchdog_s)
        for name in ("copies_in_flight", "gpu_ops_in_flight", "pin_threads"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(self.launch_mb >= 0, "launch_mb", f"must be >= 0, got {self.launch_mb:g}")
        require(self.staging_mb >= 1e-3, "staging_mb", f"must be at least 0.001, got {self.staging_mb:g}")
        told = f"must be at least 1 or null, got {self.cpu_threads}"
        require(self.cpu_threads is None or self.cpu_threads >= 1, "cpu_threads", told)
        base.require_kernels(self.triton)


class CudaMachine(ThreadedMachine):
    """`runtime` is the device; tests have another. `node`: where the device is, for host memory and cores near it."""

    label: ClassVar[str] = "measured"
    name: ClassVar[str] = "cuda"
    launches_ahead: ClassVar[bool] = True
    warms_up: ClassVar[bool] = True

    def __init__(
        self,
        *,
        runtime: DeviceRuntime,
        capacities_bytes: dict[str, int],
        config: Config,
        node: Node | None = None,
        tell: Progress | None = None,
    ) -> None:
        compute = Depth(config.gpu_ops_in_flight)
        copies = Depth(config.copies_in_flight, int(config.launch_mb * 1e6))
        lock = threading.Lock()
        streams = {GPU: [DeviceStream(runtime, lock, compute)]}
        for lane in _COPY_LANES:
            streams[lane] = [DeviceStream(runtime, lock, copies, urgent=urgent) for urgent in (False, True)]
        told = tell or partial(print, file=sys.stderr)
        self._memory = DeviceArenas(
            runtime, streams[GPU][0].handle, HostMemory(node), poison=config.poison, progress=told
        )
        super().__init__(
            arenas=self._memory, capacities_bytes=capacities_bytes, board=IssueBoard(), watchdog_s=config.watchdog_s,
            lock=lock,
        )  # fmt: skip
        self._issues: IssueBoard = self._board  # type: ignore[assignment]
        self.gpu_kernels = frozenset(config.triton) if gpu_kernels.available() else frozenset()
        self._runtime, self._node = runtime, node
        cpu_threads = config.cpu_threads or max(1, min(len(self._cores()), num_cores()) - len(DEVICE_LANES))
        pin_threads = config.pin_threads + (config.pin_threads == cpu_threads)  # pools of one size are one pool
        self._lane_threads = {LaneKind.CPU: cpu_threads, LaneKind.PIN: pin_threads}
        self._clock, self._clock_lock = DeviceClock(runtime), threading.Lock()
        self._launched: dict[Ticket, tuple[DeviceStream, Any]] = {}  # where the last packet stands, and its event
        self._queues: list[DeviceQueue] = []
        self._take_staging(streams, int(config.staging_mb * 1e6))
        self.link_ceilings_gb_s = self._measured_links(streams)
        self._device_facts = runtime.facts()  # while it is at its speed
        for lane, its_streams in streams.items():
            self._open_lane(lane, its_streams)

    @property
    def facts(self) -> dict[str, str]:
        found = self._device_facts | {"clock error": f"{self.clock_error_s * 1e6:.0f} us"}
        rates = (self.link_ceilings_gb_s or {}).items()
        return super().facts | found | {f"measured {lane} ceiling": f"{rate:.2f} GB/s" for lane, rate in rates}

    @property
    def clock_error_s(self) -> float:
        """The most by which times of device spans may be from the host's clock."""
        return self._clock.error_s + self._clock.drift_s

    def peak_temporaries_bytes(self) -> int:
        return self._runtime.peak_temporaries_bytes()

    def _take_staging(self, streams: dict[Lane, list[DeviceStream]], nbytes: int) -> None:
        if "pinned" not in self.tiers:
            return
        for lane in _COPY_LANES:
            for stream in streams[lane]:
                buffer = self.tiers["pinned"].reserve(f"{lane} staging", nbytes)
                stream.ring = StagingRing(self._memory.bytes_of(buffer))

    def _measured_links(self, streams: dict[Lane, list[DeviceStream]]) -> dict[str, float] | None:
        """Measure each direction alone, with packets as large as the staging memory: some milliseconds."""
        rings = {str(lane): streams[lane][0].ring for lane in _COPY_LANES}
        found: dict[str, float] = {}
        for name, ring in rings.items():
            if ring is None:
                return None
            found |= link_rates_gb_s(self._runtime, {name: ring.memory})
        return found

    def _open_lane(self, lane: Lane, streams: list[DeviceStream]) -> None:
        """Start the threads that launch and that watch the streams: the last one takes urgent ops, the first one the
        others."""
        self._wake[lane] = threading.Condition(self._lock)
        for stream in streams:
            classes = tuple(urgent for urgent in (True, False) if stream is streams[-1 if urgent else 0])
            queue = DeviceQueue(self._board.lane(lane), stream, classes=classes, first=streams[-1])
            self._queues.append(queue)
            name = f"stream {streams.index(stream)} of lane {lane}"
            self._start_thread(partial(self._launch_all, lane, queue), f"launches on {name}")
            self._start_thread(partial(self._watch, stream), name)

    # -- host lanes -----------------------------------------------------------------------------------------------

    def _start_lane(self, lane: Lane) -> None:
        if lane.kind in DEVICE_LANES:
            raise MachineError(f"lane {lane}: this machine has one GPU, of rank 0")
        super()._start_lane(lane)

    def _enter_thread(self) -> None:
        super()._enter_thread()
        self._runtime.use()
        if self._node is not None:
            os.sched_setaffinity(threading.get_native_id(), self._node.cores)

    def _host_context(self, lane: Lane) -> HostContext:
        return HostContext(lane, self._arenas, threads=self._lane_threads[lane.kind])

    def _cores(self) -> list[int]:
        return list(self._node.cores) if self._node else sorted(os.sched_getaffinity(0))

    # -- launching ------------------------------------------------------------------------------------------------

    def _launch_all(self, lane: Lane, queue: DeviceQueue) -> None:
        self._runtime.use(queue.stream.handle)
        while not self._stopped:
            found = queue.next()
            if found is None:
                self._wake[lane].wait()
                continue
            if not self._launch(queue, *found):
                return

    def _launch(self, queue: DeviceQueue, ticket: Ticket, packet: int) -> bool:
        """Put some packets into their stream; False where that failed. The lock is released meanwhile."""
        op, stream, count = ticket.op, queue.stream, 0
        if packet == 0:
            queue.begin(ticket)
            self._issues.start(ticket, time.monotonic())
            self._order_behind(stream, ticket)
        first, last, mark = stream.event(), stream.event(), self._clock.mark
        room = stream.take_slot, stream.give_back
        context = DeviceContext(ticket.lane, self._memory, self._runtime, stream.handle, *room)
        result: list[Any] = []
        error: BaseException | None = None
        share = Work()
        stream.launching = True
        self._lock.release()
        try:
            self._runtime.record(first, stream.handle)
            try:
                share = packet_work(op.work(), op.packets)
                count = min(stream.depth.packets(share), op.packets - packet)
                for number in range(packet, packet + count):
                    self._run(stream, partial(_run_packet, op, context, number, result), ticket.lane)
                context.flush()
            finally:  # what went to the device before an error is waited for like all else
                self._runtime.record(last, stream.handle)
        except BaseException as caught:
            error = caught
        finally:
            self._lock.acquire()
        stream.launching = False
        work = Work(*(count * amount for amount in share))
        stream.add(Launched(ticket, packet, count, first, last, mark, context, result, work))
        if error is not None:
            self._fail(str(ticket), error)
            return False
        queue.go_on(ticket, packet + count)
        if packet + count == op.packets:
            self._launched[ticket] = (stream, last)
            now_s = time.monotonic()
            for freed in self._issues.issue(ticket):
                self._freed(freed, now_s)
        return True

    def _order_behind(self, stream: DeviceStream, ticket: Ticket) -> None:
        """Let the stream wait for whatever the ticket follows that is still under way on other streams."""
        for dependency in ticket.waits_for:
            if not dependency.settled:
                other, event = self._launched[dependency]
                if other is not stream:
                    self._runtime.wait(stream.handle, event)
        ticket.waits_for = ()

    def _run(self, stream: DeviceStream, run: Callable[[], None], lane: Lane) -> None:
        """Run packets. On copy lanes the op's own code runs here and its copies go to the stream; on the gpu lane all
        its work does."""
        self._runtime.launch(stream.handle, run) if lane.kind is LaneKind.GPU else run()

    # -- watching -------------------------------------------------------------------------------------------------

    def _watch(self, stream: DeviceStream) -> None:
        """Watch packets of a stream as they end, and go on after a failure until nothing is under way."""
        while True:
            while not stream.under_way:
                if self._stopped and not stream.launching:
                    return
                stream.changed.wait()
            launched = stream.under_way[0]
            times_s = self._await(stream, launched)
            stream.remove(launched)
            if times_s is not None and len(launched.result) == launched.count > 0:
                self._ended(stream, launched, *times_s)
            self._wake[launched.ticket.lane].notify_all()  # there is room for another packet

    def _await(self, stream: DeviceStream, launched: Launched) -> tuple[float, float] | None:
        """Return when the packet began and ended, or None where it failed. The lock is released meanwhile."""
        error: BaseException | None = None
        times_s: tuple[float, float] | None = None
        self._lock.release()
        try:
            self._runtime.synchronize(launched.last)
            # Marks of the clock differ by their errors; packets of a stream do not overlap, nor end after now.
            end_s = max(min(self._clock.seconds(launched.mark, launched.last), time.monotonic()), stream.ended_s)
            start_s = max(self._clock.seconds(launched.mark, launched.first), stream.ended_s)
            times_s = min(start_s, end_s), end_s
            for staged in launched.context.staged:
                staged.fill()
            if self._clock_lock.acquire(blocking=False):
                try:
                    self._clock.refresh()
                finally:
                    self._clock_lock.release()
        except BaseException as caught:
            error, times_s = caught, None
        finally:
            self._lock.acquire()
        if error is not None and self._failure is None:
            others = [str(w.ticket) for queue in self._queues for w in queue.stream.under_way]
            # The device tells that something failed, not what: anything that was under way may be it.
            self._fail(f"{launched.ticket}, or another of {', '.join(others)}," if others[1:] else others[0], error)
        return times_s

    def _ended(self, stream: DeviceStream, launched: Launched, start_s: float, end_s: float) -> None:
        ticket, packet, op = launched.ticket, launched.packet, launched.ticket.op
        stream.ended_s = end_s
        self._idle_s = 0.0
        ticket.packets_run += launched.count
        self.spans.append(
            Span(
                ticket.lane, op.kind, op.layer, op.micro_batch, ticket.number, packet, op.packets, ticket.urgent,
                start_s, end_s, 0.0, launched.work,
            )
        )  # fmt: skip
        if packet == 0:
            self._issues.restart(ticket, start_s)
        if packet + launched.count == op.packets:
            ticket.value = launched.result[-1]
            del self._launched[ticket]
            for freed in self._issues.finish(ticket, end_s):
                self._freed(freed, end_s)
            self._progress.set()

    # -- stopping -------------------------------------------------------------------------------------------------

    def _wake_all(self) -> None:
        super()._wake_all()
        for queue in self._queues:
            queue.stream.changed.notify_all()

    def close(self) -> None:
        """Stop ops at their next packet. Memory that the device may still write is never freed."""
        if self._closing:
            return
        super().close()

    def _give_memory_back(self) -> None:
        if any(worker.is_alive() for worker in self._workers):
            _never_freed.append(self._memory)
        else:
            try:
                self._memory.close()
            except DeviceError:
                if self._failure is None:  # else what broke the device has been told, and this only follows from it
                    raise


def _run_packet(op: Op, context: DeviceContext, packet: int, result: list[Any]) -> None:
    result.append(op.run_packet(context, packet))


def device_found() -> bool:
    """Tell whether there is a GPU that torch can use."""
    return torch.cuda.is_available()


def device_lost() -> str | None:
    """Say why the GPU is of no more use to this process, if so: CUDA's errors in a kernel stay until the process
    ends."""
    if _never_freed:
        return "a machine's work on it did not come to its end"
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def resource() -> str:
    """Name the first GPU, by the number that it has for every process."""
    return f"cuda-{torch.cuda.get_device_properties(0).uuid}" if device_found() else "cuda"


def build(config: Config, hardware: HardwareConfig, spec: ModelSpec) -> CudaMachine:
    """Build the machine of the first GPU, as large as the profile says; its rates are its own."""
    several = f"must be 1 on machine=cuda, got {hardware.num_gpus}; machine=emulated and machine=simulated have several"
    require(hardware.num_gpus == 1, "hardware.num_gpus", several)
    if not device_found():
        raise ConfigError("machine.name", "cuda needs an NVIDIA GPU that torch can use; machine=emulated needs none")
    runtime = TorchCudaRuntime()
    told = f"must be float32 on {runtime.name}, which has no bfloat16 (GPUs before compute capability 8.0)"
    require(spec.dtype != "bfloat16" or runtime.has_bfloat16, "model.dtype", f"{told}, got bfloat16")
    # Beside the planned bytes: what the allocator rounds up, and the workspaces of cuBLAS.
    largest_gb = (runtime.free_bytes - _ROUNDING_BYTES) / 1e9
    require(
        hardware.device_memory_gb <= largest_gb,
        "hardware.device_memory_gb",
        f"must be at most {largest_gb:.4g}: {runtime.name} has {runtime.total_bytes / 1e9:.4g} GB, of which "
        f"{runtime.free_bytes / 1e9:.4g} are free and {_ROUNDING_BYTES / 1e9:.2g} are for rounding; "
        f"got {hardware.device_memory_gb:g}",
    )
    gpu_kernels.choose(config.triton)
    runtime.limit_memory(int(hardware.device_memory_gb * 1e9) + _ROUNDING_BYTES)
    machine = CudaMachine(
        runtime=runtime,
        capacities_bytes=hardware.capacities_bytes,
        config=replace(config, pin_threads=hardware.pin_threads or config.pin_threads),
        node=node_of(runtime.pci_bus_id),
    )
    machine.host_bytes_s = None if hardware.host_gb_s is None else hardware.host_gb_s * 1e9
    return machine
