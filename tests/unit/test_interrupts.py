"""Ctrl-C in places where Python drops it."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from harness.interrupts import INTERRUPTED, exit_code, interrupts_kept
from tests.kernels.eventually import eventually


class _InterruptedWhenFinalised:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the exception is raised here, and dropped


def test_an_interrupt_within_a_finaliser_takes_effect(request):
    before, ignored = sys.unraisablehook, signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ignored))  # as in a shell's background jobs
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        dropped = _InterruptedWhenFinalised()
        del dropped
        eventually(lambda: False)
    assert sys.unraisablehook is before


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
