"""A device without a device: streams are threads that run what they are given later, after random pauses.

`CudaMachine` over it is the same code as over a GPU. Whoever forgets to let one stream wait for another reads memory
before it was written, so that tokens come out wrong.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from harness.machine.cuda import Config, CudaMachine
from harness.machine.device.runtime import DeviceError

CLOCK_OFFSET_S, CLOCK_RATE = 4321.0, 1 + 2e-5  # the device's own clock


class FakeEvent:
    def __init__(self, lock: threading.RLock) -> None:
        self.over = threading.Condition(lock)
        self.recorded = self.reached = 0
        self.device_s = 0.0
        self.error: BaseException | None = None


class FakeStream:
    """Runs actions in order; `hold` keeps it from starting the next one."""

    def __init__(self, device: FakeDevice, number: int, urgent: bool) -> None:
        self.number, self.urgent, self.device = number, urgent, device
        self.actions: deque[tuple[Callable[[], Any], bool]] = deque()
        self.given = threading.Condition(device.lock)
        threading.Thread(target=self._work, name=f"fake stream {number}", daemon=True).start()

    def push(self, action: Callable[[], Any], *, at_once: bool = False) -> None:
        """Push an action. With `at_once`, whoever sees what the action did also sees that it is over."""
        with self.device.lock:
            self.actions.append((action, at_once))
            self.given.notify()

    def _work(self) -> None:
        while True:
            with self.device.lock:
                self.device.wait_for(self.given, lambda: self.actions and not self.device.held)
                if self.device.closed:
                    return
                action, at_once = self.actions[0]
            self.device.pause()
            try:
                with self.device.lock if at_once else nullcontext():
                    action()
                    if at_once:
                        self._done()
                        continue
            except BaseException as error:  # what a kernel does wrong shows at the next event, and ends everything
                self.device.broken = self.device.broken or error
            with self.device.lock:
                self._done()

    def _done(self) -> None:
        self.actions.popleft()
        if not self.actions:
            self.device.idle.notify_all()


class FakeDevice:
    """A fake `DeviceRuntime`. `longest_pause_s`: before each thing that a stream does, at random up to that. `blocking`
    lists the calls that block or allocate, for tests that allow none. `unpinnable`: more than so many pinned bytes are
    refused."""

    name = "fake device"
    has_bfloat16 = True
    pci_bus_id = None
    ramp_s = 0.0
    temporaries_bytes = 0  # that every op is said to have taken at its peak

    def __init__(self, seed: int = 0, *, longest_pause_s: float = 3e-4, total_bytes: int = 1 << 30) -> None:
        self.total_bytes = self.free_bytes = total_bytes
        self.lock = threading.RLock()
        self.idle = threading.Condition(self.lock)  # a stream has nothing more to do
        self.waited_for: Counter[threading.Condition] = Counter()  # now; each wakes those only whom it concerns
        self.held = self.closed = False
        self.broken: BaseException | None = None
        self.blocking: list[str] = []
        self.streams: list[FakeStream] = []
        self.unpinnable_from = 1 << 40
        self.pinned: dict[int, int] = {}  # address -> bytes
        self._random = random.Random(seed)
        self._longest_pause_s = longest_pause_s
        self._device: list[torch.Tensor] = []
        self._limit_bytes = total_bytes

    # -- steering -------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        if self._longest_pause_s and self._random.random() < 0.15:
            time.sleep(self._random.random() * self._longest_pause_s)

    def hold(self, on: bool) -> None:
        with self.lock:
            self.held = on
            self._wake_all()

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self._wake_all()

    def wait_for(self, condition: threading.Condition, holds: Callable[[], Any]) -> None:
        """Wait, with the lock held, until that holds or the device is closed."""
        self.waited_for[condition] += 1
        condition.wait_for(lambda: holds() or self.closed)
        self.waited_for[condition] -= 1

    def _wake_all(self) -> None:
        for condition in +self.waited_for:
            condition.notify_all()

    # -- DeviceRuntime --------------------------------------------------------------------------------------------

    def use(self, stream: FakeStream | None = None) -> None:
        """Do nothing, since threads need nothing here."""

    def facts(self) -> dict[str, str]:
        return {"GPU": self.name}

    def limit_memory(self, nbytes: int) -> None:
        self._limit_bytes = nbytes

    def peak_temporaries_bytes(self) -> int:
        return self.temporaries_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.blocking.append("allocate")
        if nbytes > self._limit_bytes:
            raise torch.OutOfMemoryError(f"{nbytes} bytes asked, {self._limit_bytes} allowed")
        return torch.empty(nbytes, dtype=torch.uint8)

    def release_unused(self) -> None:
        self.blocking.append("release unused")

    def pin(self, memory: torch.Tensor) -> None:
        self.blocking.append("pin")
        if sum(self.pinned.values()) + memory.nbytes > self.unpinnable_from:
            raise DeviceError("cudaHostRegister failed: out of memory")
        self.pinned[memory.data_ptr()] = memory.nbytes

    def unpin(self, memory: torch.Tensor) -> None:
        assert self.pinned.pop(memory.data_ptr()) == memory.nbytes

    def stream(self, *, urgent: bool = False) -> FakeStream:
        self.streams.append(FakeStream(self, len(self.streams), urgent))
        return self.streams[-1]

    def event(self) -> FakeEvent:
        return FakeEvent(self.lock)

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        event.recorded += 1
        turn = event.recorded

        def reach() -> None:
            with self.lock:
                event.reached, event.error = turn, self.broken
                event.device_s = CLOCK_OFFSET_S + time.monotonic() * CLOCK_RATE
                event.over.notify_all()

        stream.push(reach, at_once=True)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        turn = event.recorded

        def wait() -> None:
            with self.lock:
                self.wait_for(event.over, lambda: event.reached >= turn)

        stream.push(wait)

    def query(self, event: FakeEvent) -> bool:
        with self.lock:
            self._raise(event)
            return event.reached >= event.recorded

    def synchronize(self, event: FakeEvent) -> None:
        with self.lock:
            self.wait_for(event.over, lambda: event.reached >= event.recorded)
            self._raise(event)

    def _raise(self, event: FakeEvent) -> None:
        if event.error is not None:
            raise RuntimeError(f"CUDA error: {event.error}") from event.error

    def elapsed_s(self, first: FakeEvent, second: FakeEvent) -> float:
        assert min(first.reached, second.reached) > 0, "an event that was never reached has no time"
        return second.device_s - first.device_s

    def settle(self) -> None:
        with self.lock:
            self.wait_for(self.idle, lambda: self.held or not any(stream.actions for stream in self.streams))

    def launch(self, stream: FakeStream, run: Callable[[], Any]) -> None:
        stream.push(run)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: FakeStream) -> None:
        pinned = [self._is_pinned(dst), self._is_pinned(src)]
        assert sum(pinned) == 1, f"a copy between the device and pinned memory, not {pinned}"
        assert dst.dtype == src.dtype
        strided = "torch would take memory on the device and copy twice"
        assert dst.is_contiguous() and src.is_contiguous(), strided
        stream.push(lambda: dst.copy_(src))

    def copy_now(self, dst: torch.Tensor, src: torch.Tensor, stream: FakeStream) -> None:
        self.blocking.append("copy_now")
        event = self.event()
        stream.push(lambda: dst.copy_(src))
        self.record(event, stream)
        self.synchronize(event)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < start + size for start, size in self.pinned.items())


def cuda_machine(
    capacities_bytes: dict[str, int], *, device: FakeDevice | None = None, seed: int = 0, **settings: Any
) -> CudaMachine:
    """Build the machine over a fake device, with small staging."""
    config = Config(**{"poison": True, "staging_mb": 0.05, "cpu_threads": 1} | settings)
    return CudaMachine(runtime=device or FakeDevice(seed), capacities_bytes=capacities_bytes, config=config)
