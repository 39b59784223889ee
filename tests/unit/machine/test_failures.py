"""Whatever goes wrong inside a lane ends the run with the op's name, at once, from whatever is called next."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, MachineError, Op, Ticket, Work
from harness.machine.emulated import EmulatedMachine
from harness.machine.shuffled import ShuffledMachine
from harness.machine.threads import machine as threaded
from tests.kernels.eventually import GIVE_UP_S, eventually
from tests.unit.machine.ops import Gated, Quick, Raising, Sleeping


class Stop(BaseException):
    """Like KeyboardInterrupt or SystemExit: not an Exception."""


ERRORS = [ValueError("bad shape"), MemoryError("no memory left"), Stop("stop")]
CALLS = {
    "wait": lambda machine, ticket: machine.wait(ticket),
    "wait for another": lambda machine, ticket: machine.wait(machine.submit(D2H, Quick(), after=[ticket])),
    "wait_any": lambda machine, ticket: machine.wait_any([ticket]),
    "drain": lambda machine, ticket: machine.drain(),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_error_in_a_lane_reaches_the_caller_with_the_name_of_the_op(emulated, call, error):
    machine = emulated()
    with pytest.raises(
        MachineError, match=rf"raising layer 7 mb 1 on cpu failed: {type(error).__name__}: {error}"
    ) as e:
        call(machine, machine.submit(CPU, Raising(error, packets=2, at=1)))
    assert e.value.__cause__ is error
    machine.close()


def test_an_error_where_the_cost_of_an_op_is_computed_is_an_error_of_the_op(emulated):
    machine = emulated()
    ticket = machine.submit(CPU, Raising(ZeroDivisionError("no experts"), in_work=True))
    with pytest.raises(MachineError, match="raising.*no experts"):
        machine.wait(ticket)


def test_an_op_must_state_its_cost():
    class Costless(Op):
        kind = "costless"

    with pytest.raises(TypeError, match="abstract.*work"):
        Costless()


def test_a_value_that_no_simulated_machine_could_imagine_is_an_error(machine):
    class Bringing(Op):
        kind = "bringing"

        def work(self):
            return Work()

        def run(self, ctx, packet):
            return 7

    with pytest.raises(MachineError, match="bringing.* must define imagine"):
        machine.wait(machine.submit(D2H, Bringing()))


def test_after_a_failure_everything_fails_and_nothing_runs(machine):
    failing = Raising(ValueError("bad shape"))
    with pytest.raises(MachineError, match="raising"):
        machine.wait(machine.submit(CPU, failing))
    for call in (machine.drain, lambda: machine.submit(GPU, Quick()), lambda: machine.submit(H2D, Quick())):
        with pytest.raises(MachineError, match="raising.*bad shape"):
            call()
    assert failing.times_run == 1
    machine.close()
    machine.close()


def test_the_first_failure_is_the_one_that_is_told(emulated):
    machine, second = emulated(), Gated()
    ticket = machine.submit(GPU, second)
    second.await_packet(0)
    first = machine.submit(CPU, Raising(ValueError("first")))
    with pytest.raises(MachineError, match="first"):
        machine.wait(first)
    second.open()
    machine.close()
    with pytest.raises(MachineError, match="first"):
        machine.wait(ticket)


def test_a_failing_urgent_op_stops_the_op_it_interrupts_and_the_urgent_ones_behind_it(emulated):
    machine, large, behind = emulated(), Gated(packets=3), Gated()
    ticket = machine.submit(H2D, large)
    large.await_packet(0)
    machine.submit(H2D, Raising(ValueError("urgent")), urgent=True)
    machine.submit(H2D, behind, urgent=True)
    large.open()
    behind.open()
    with pytest.raises(MachineError, match="raising.*urgent"):
        machine.wait(ticket)
    machine.close()
    assert [(s.ticket, s.packet) for s in machine.spans] == [(0, 0)]


def test_an_interrupt_in_the_shuffled_machine_stays_an_interrupt():
    """There the strategy's thread runs the ops, so that Ctrl-C arrives inside one."""
    machine, op = ShuffledMachine(capacities_bytes={}, seed=0, eager=0.0), Raising(Stop("like Ctrl-C"))
    ticket = machine.submit(CPU, op)
    with pytest.raises(Stop):
        machine.wait(ticket)
    with pytest.raises(MachineError, match="raising.*Ctrl-C"):
        machine.wait(ticket)
    assert op.times_run == 1


def test_a_thread_that_cannot_start_is_the_cause_that_is_told(emulated, monkeypatch):
    machine, start = emulated(), threading.Thread.start

    def refused(thread):
        if thread.name == "lane cpu":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    machine.wait(machine.submit(GPU, Quick()))
    for _ in range(2):
        with pytest.raises(MachineError, match="lane cpu failed: RuntimeError: can't start new thread"):
            machine.submit(CPU, Quick())
    machine.close()


def test_an_interrupt_while_waiting_leaves_the_machine_whole(emulated, request):
    machine, blocked, waits = emulated(), Gated(), threading.Event()

    class Interrupting(Sleeping):
        def run(self, ctx, packet):
            assert waits.wait(GIVE_UP_S)  # elsewhere an interrupt may cut a submission in two
            os.kill(os.getpid(), signal.SIGINT)
            return super().run(ctx, packet)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt):
        machine.submit(GPU, Interrupting(0.05))
        ticket = machine.submit(CPU, blocked)
        waits.set()
        machine.wait(ticket)
    blocked.open()
    assert machine.wait(machine.submit(CPU, Quick("still works"))) == "still works"
    machine.drain()
    machine.close()


class InterruptedLock:
    """A lock after whose `nth` release by the main thread Ctrl-C comes."""

    def __init__(self, nth: int) -> None:
        self.left, self._lock = nth, threading.Lock()
        self.acquire, self.locked = self._lock.acquire, self._lock.locked

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()

    def release(self):
        self._lock.release()
        self.left -= threading.current_thread() is threading.main_thread()
        if self.left == 0 and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt


@pytest.mark.parametrize("nth", range(1, 5))
def test_an_interrupt_stays_one_wherever_a_call_lets_go_of_the_lock(emulated, nth):
    machine, blocked = emulated(watchdog_s=4e-2), Gated()
    machine._lock = lock = InterruptedLock(nth)
    with pytest.raises(KeyboardInterrupt):
        machine.wait(machine.submit(CPU, blocked))
    assert lock.acquire(timeout=GIVE_UP_S), "nobody holds it for good"
    lock.release()
    blocked.open()
    machine.close()
    assert not any(worker.is_alive() for worker in machine._workers)


def test_a_deadlock_is_found_at_once_and_says_who_waits_for_whom(machine):
    """Only something that this machine never got can block it: its own ops always depend on earlier ones."""
    foreign = Ticket(op=Quick(), lane=GPU, number=77, urgent=False)
    machine.submit(CPU, Quick(), after=[foreign])
    blocked = machine.submit(H2D, Gated(), urgent=True, after=[foreign])
    with pytest.raises(MachineError) as e:
        machine.wait(blocked)
    text = str(e.value)
    assert text.startswith("deadlock"), "the check, not the watchdog, finds it"
    assert "lane cpu: 1 pending" in text
    assert "lane h2d: 1 pending" in text
    assert "gated on h2d urgent waits for #77 quick on gpu" in text


@pytest.mark.parametrize("call", ["wait_any", "drain"])
def test_a_deadlock_is_found_by_every_way_to_wait(machine, call):
    ticket = machine.submit(CPU, Quick(), after=[Ticket(op=Quick(), lane=GPU, number=77, urgent=False)])
    with pytest.raises(MachineError, match="deadlock"):
        machine.drain() if call == "drain" else machine.wait_any([ticket])


def test_the_watchdog_names_the_op_that_does_not_end(emulated):
    machine, stuck = emulated(watchdog_s=0.2), Gated(packets=2)
    ticket = machine.submit(GPU, stuck)
    machine.submit(CPU, Quick(), after=[ticket])
    stuck.open(0)
    stuck.await_packet(1)
    with pytest.raises(MachineError) as e:
        machine.drain()
    assert str(e.value).startswith("watchdog")
    assert "#0 gated on gpu runs, 1 of 2 packets done" in str(e.value)
    assert "#1 quick on cpu waits for #0 gated on gpu" in str(e.value)
    stuck.open()


def test_the_watchdog_lets_slow_but_steady_work_go_on(emulated):
    machine = emulated(watchdog_s=1.5)
    machine.wait(machine.submit(GPU, Sleeping(0.1, packets=20)))


def test_a_time_in_which_the_process_stood_still_is_no_fault(emulated, monkeypatch):
    """As after Ctrl-Z and `fg`, or on a virtual machine that was paused: the clock went on, and no lane had time."""
    stopped_s, looks, main = [0.0], [0], threading.current_thread()

    def monotonic() -> float:
        looks[0] += threading.current_thread() is main
        return time.monotonic() + stopped_s[0]

    class Stopped(Quick):
        def run(self, ctx, packet):
            seen = looks[0]
            eventually(lambda: looks[0] > seen + 1)  # the strategy's thread waits
            stopped_s[0], seen = 1000.0, looks[0]
            eventually(lambda: looks[0] > seen + 1)  # it has looked at the clock again, and gone on waiting
            return super().run(ctx, packet)

    machine = emulated(watchdog_s=100.0)
    monkeypatch.setattr(threaded, "time", SimpleNamespace(monotonic=monotonic, thread_time=time.thread_time))
    assert machine.wait(machine.submit(D2H, Stopped("went on"))) == "went on"


def test_polling_ends_with_the_error(machine):
    """Else whoever polls while something else is kept going would do so for ever."""
    machine.submit(CPU, Raising(ValueError("bad shape")))
    with pytest.raises(MachineError, match="raising.*bad shape"):
        eventually(lambda: False, meanwhile=machine.now if not isinstance(machine, ShuffledMachine) else machine.drain)
    with pytest.raises(MachineError, match="raising.*bad shape"):
        machine.now()


def test_close_stops_running_ops_at_their_next_packet(emulated):
    machine = emulated()
    ticket = machine.submit(H2D, Sleeping(0.01, packets=100_000))
    waiting = machine.submit(H2D, Quick())
    machine.close()
    eventually(lambda: not any(worker.is_alive() for worker in machine._workers))
    assert ticket.packets_run < 100_000
    for call in (lambda: machine.wait(ticket), lambda: machine.wait(waiting), machine.drain):
        with pytest.raises(MachineError, match="closed"):
            call()
    for lane in (H2D, CPU):
        with pytest.raises(MachineError, match="closed"):
            machine.submit(lane, Quick())


def test_values_stay_readable_after_close(emulated):
    machine: EmulatedMachine = emulated()
    ticket = machine.submit(D2H, Quick(3))
    machine.drain()
    machine.close()
    assert machine.wait(ticket) == 3
