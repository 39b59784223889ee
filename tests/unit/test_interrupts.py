"""Ctrl-C in places where Python drops it, SIGTERM as another Ctrl-C, and the second of either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import run
from harness.interrupts import INTERRUPTED, TERMINATED, exit_code, interruption_behind, interrupts_kept
from tests.conftest import ROOT
from tests.kernels.eventually import GIVE_UP_S, eventually


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """Neither signal is ignored, as SIGINT is in a shell's background jobs."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _InterruptedWhenFinalised:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.01)  # the exception is raised here, and dropped


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGINT, INTERRUPTED, "interrupted\n"), (signal.SIGTERM, TERMINATED, "terminated\n")],
)
def test_a_signal_takes_effect_also_within_a_finaliser(number, code, text, capsys):
    def command():
        dropped = _InterruptedWhenFinalised(number)
        del dropped
        eventually(lambda: False)

    before = sys.unraisablehook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert exit_code(command) == code == 128 + number
    assert capsys.readouterr().err == text
    assert (sys.unraisablehook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM")])
def test_a_second_signal_ends_the_process_at_once(first, second):
    code = f"""
import os, signal
import run
from harness.interrupts import interrupts_kept
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupts_kept():
    try:
        os.kill(os.getpid(), signal.{first})
        signal.pause()
    except KeyboardInterrupt:
        with interrupts_kept():  # of something within
            os.kill(os.getpid(), signal.{second})
            signal.pause()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=GIVE_UP_S)
    assert done.returncode == -getattr(signal, second), done.stderr


def test_a_signal_that_is_ignored_or_handled_by_others_stays_so():
    received = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    with interrupts_kept():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: received)


def test_an_error_that_takes_the_place_of_an_interrupt_is_told_as_one(monkeypatch, capsys):
    def cut_in_two():
        try:
            raise KeyboardInterrupt
        finally:
            object.half_made  # noqa: B018

    monkeypatch.setattr(run, "run", cut_in_two)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    assert interruption_behind(ValueError()) is None


def test_other_faults_of_finalisers_are_reported_as_before(monkeypatch):
    class Faulty:
        def __del__(self) -> None:
            raise ValueError("of a finaliser")

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    with interrupts_kept():
        faulty = Faulty()
        del faulty
    assert [each.exc_type for each in reported] == [ValueError]


def test_a_command_that_is_interrupted_says_so_without_a_traceback(capsys):
    def command():
        raise KeyboardInterrupt

    assert exit_code(command) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    assert exit_code(lambda: 2) == 2


STUCK = """
import sys, threading, time, kernels
from harness.interrupts import leave
begun = threading.Event()
def serve():
    begun.set()
    kernels.sleep_until(time.monotonic() + 1.0 + float(sys.argv[1]))
kernels.sleep_until(0.0)  # the extension is loaded
threading.Thread(target=serve, name="lane h2d", daemon=True).start()
begun.wait()
print("told", end="")
leave(143)
"""


def test_a_lane_that_is_stuck_in_native_code_does_not_change_the_exit_code():
    """The interpreter would end the thread amid C++ frames as soon as it asks for the GIL, and abort."""
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, str(GIVE_UP_S)], cwd=ROOT, capture_output=True, text=True, timeout=GIVE_UP_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "told", "")
