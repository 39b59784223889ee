"""Define small ops whose moments a test controls."""

from __future__ import annotations

import threading
import time

from harness.machine.base import Op, Work
from tests.kernels.eventually import GIVE_UP_S


class FreeOp(Op):
    """An op that costs nothing and brings whatever its `run` returns: a base for ops whose cost is no matter."""

    def work(self):
        return Work()

    def imagine(self, world):
        return None


class Gated(FreeOp):
    """Signals `begun` when a packet begins, and lets it go on when the test calls `open`."""

    kind = "gated"

    def __init__(self, packets: int = 1, **touches: tuple) -> None:
        self.packets = packets
        self.reads, self.writes = touches.get("reads", ()), touches.get("writes", ())
        self._begun = [threading.Event() for _ in range(packets)]
        self._gates = [threading.Event() for _ in range(packets)]

    def run(self, ctx, packet):
        self._begun[packet].set()
        assert self._gates[packet].wait(GIVE_UP_S), "the test did not open the gate"
        return packet

    def await_packet(self, packet: int) -> None:
        assert self._begun[packet].wait(GIVE_UP_S), "the packet did not begin"

    def open(self, *packets: int) -> None:
        for packet in packets or range(self.packets):
            self._gates[packet].set()


class Quick(FreeOp):
    """Returns its `result`."""

    kind = "quick"

    def __init__(self, result: object = None, packets: int = 1, **touches: tuple) -> None:
        self.result, self.packets = result, packets
        self.reads, self.writes = touches.get("reads", ()), touches.get("writes", ())

    def run(self, ctx, packet):
        return self.result


class Sleeping(FreeOp):
    """Sleeps `seconds` a packet."""

    kind = "sleeping"

    def __init__(self, seconds: float, packets: int = 1) -> None:
        self.seconds, self.packets = seconds, packets

    def run(self, ctx, packet):
        time.sleep(self.seconds)


class Raising(FreeOp):
    """Raises `error` in its packet number `at`, or where its cost is asked for."""

    kind = "raising"

    def __init__(self, error: BaseException, *, packets: int = 1, at: int = 0, in_work: bool = False) -> None:
        self.error, self.packets, self.at, self.in_work = error, packets, at, in_work
        self.layer, self.micro_batch = 7, 1
        self.times_run = 0

    def work(self):
        if self.in_work:
            raise self.error
        return Work()

    def run(self, ctx, packet):
        self.times_run += 1
        if packet == self.at:
            raise self.error
