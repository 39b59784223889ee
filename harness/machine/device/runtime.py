"""The few things a machine asks of a CUDA device, as a protocol, so that tests can have streams of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch

from harness.machine.device.facts import gpu_facts
from kernels import triton as gpu


class DeviceError(RuntimeError):
    """The device or its driver refused; the text says what."""


class DeviceRuntime(Protocol):
    """Streams run what they are given in order and beside each other; events mark places in them. Only `synchronize`,
    `settle`, `allocate`, `release_unused`, `pin` and `copy_now` block, and within a pass only the first two are called.
    """

    name: str  # of the device, for the records
    total_bytes: int  # of its memory
    free_bytes: int  # of that, beside the context and other programs, when the runtime was made
    has_bfloat16: bool  # in its instructions
    pci_bus_id: str | None  # where sysfs knows the device
    ramp_s: float  # how long clocks and links take to come to their speed, when they stood idle

    def use(self, stream: Any = None) -> None:
        """Make this thread work on the device: the first thing a thread does. `launch` and `copy` take it less time for
        the `stream` that it works on."""

    def facts(self) -> dict[str, str]:
        """Ask what a reader of numbers from this device must know: its name, its driver, its link and its clocks."""

    def limit_memory(self, nbytes: int) -> None:
        """Limit the device's memory: allocations beyond that fail with torch.OutOfMemoryError."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate uint8 [nbytes] on the device."""

    def release_unused(self) -> None:
        """Release to the device memory that `allocate` gave and nobody holds any more; may wait for all its work."""

    def peak_temporaries_bytes(self) -> int:
        """Return by how much more than now was allocated at some time since the last call."""

    def pin(self, memory: torch.Tensor) -> None:
        """Let the device read and write host memory by itself. DeviceError says why not."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Take that back. DeviceError where the device refuses, as one does that has failed."""

    def stream(self, *, urgent: bool = False) -> Any: ...

    def event(self) -> Any: ...

    def record(self, event: Any, stream: Any) -> None: ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let what the stream is given from now on run after the event as it was last recorded."""

    def query(self, event: Any) -> bool:
        """Tell whether the event has been reached. Raises what went wrong on the device before it."""

    def synchronize(self, event: Any) -> None:
        """Sleep until the event has been reached. Raises what went wrong on the device before it."""

    def elapsed_s(self, first: Any, second: Any) -> float:
        """Return the seconds between two events that were reached, to about a microsecond where they are some seconds
        apart."""

    def settle(self) -> None:
        """Wait for what this thread gave the device outside of `launch` and `copy`."""

    def launch(self, stream: Any, run: Callable[[], Any]) -> None:
        """Call `run`, whose work on tensors of the device goes to the stream."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Copy contiguous memory between the device and pinned memory, in the stream."""

    def copy_now(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Copy between the device and any host memory, of any dtype and strides; return when the copy is over."""


class _Current(threading.local):
    """Holds the stream that a thread works on."""

    stream: Any = None


SMALL_COPY_BYTES = 8 << 20  # of a copy that a kernel does: the rows of some hundred tokens, not an expert


class TorchCudaRuntime:
    """The `DeviceRuntime` that torch.cuda provides."""

    ramp_s = 0.1

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        self._current = _Current()
        properties = torch.cuda.get_device_properties(self._device)
        self.name = properties.name
        self.total_bytes = int(properties.total_memory)
        self.has_bfloat16 = properties.major >= 8
        self.pci_bus_id = _pci_bus_id(properties)
        torch.backends.cuda.matmul.allow_tf32 = False  # float32 must be float32: tokens are compared
        torch.backends.cudnn.allow_tf32 = False
        self.use()
        torch.zeros(1, device=self._device)  # makes the context now
        # Of machines before this one: cuBLAS keeps a workspace of 32 MiB for every stream that it was ever used on.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        self.free_bytes = torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)
        self._uuid = str(properties.uuid)
        self._urgent: set[int] = set()  # streams

    def use(self, stream: Any = None) -> None:
        torch.cuda.set_device(self._device)
        if stream is not None:
            torch.cuda.set_stream(stream)
            self._current.stream = stream

    def facts(self) -> dict[str, str]:
        return gpu_facts(self.name, self.total_bytes, self._uuid)

    def limit_memory(self, nbytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / self.total_bytes), self._device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def release_unused(self) -> None:
        torch.cuda.empty_cache()

    def peak_temporaries_bytes(self) -> int:
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(peak_bytes)

    def pin(self, memory: torch.Tensor) -> None:
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        self._require_success("cudaHostRegister", error)

    def unpin(self, memory: torch.Tensor) -> None:
        self._require_success("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))

    def _require_success(self, what: str, error: Any) -> None:
        if int(error) == 0:
            return
        text = torch.cuda.cudart().cudaGetErrorString(error)
        with suppress(RuntimeError):  # CUDA keeps a refusal for the check behind the next kernel, in whatever run it is
            torch.empty(1, device=self._device).fill_(1.0)
        raise DeviceError(f"{what} failed: {text}")

    def stream(self, *, urgent: bool = False) -> Any:
        stream = torch.cuda.Stream(self._device, priority=-1 if urgent else 0)
        if urgent:
            self._urgent.add(stream.cuda_stream)
        return stream

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True, blocking=True)

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def query(self, event: Any) -> bool:
        return event.query()

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def elapsed_s(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) * 1e-3

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def launch(self, stream: Any, run: Callable[[], Any]) -> None:
        with self._on(stream):
            run()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        with self._on(stream):
            is_small = stream.cuda_stream in self._urgent and dst.nbytes <= SMALL_COPY_BYTES
            if is_small and gpu.serves(dst, "copies"):
                gpu.bring(dst, src)  # a copy engine would let it wait for large ones
            else:
                dst.copy_(src, non_blocking=True)

    def copy_now(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        with self._on(stream):
            dst.copy_(src)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self._current.stream is stream else torch.cuda.stream(stream)


def _pci_bus_id(properties: Any) -> str | None:
    """Write the id as sysfs does: domain:bus:device.function."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [number for number in numbers if number is not None]
    return "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == len(numbers) else None
