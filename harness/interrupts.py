"""Ctrl-C: what Python drops of it is sent again, and a command that it ends says so in a word."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130  # exit code, as shells have it
_AGAIN_AFTER_S = 0.05  # the finaliser has returned by then; where not, the interrupt is dropped and sent once more


def exit_code(command: Callable[[], int]) -> int:
    """That of `command`, whose traceback at Ctrl-C would tell a user nothing."""
    try:
        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Within the block, on the main thread, Ctrl-C takes effect whenever it comes. Python raises it wherever the main
    thread is; in a finaliser or a weak reference's callback, it only reports the exception, to `sys.unraisablehook`."""
    report, main = sys.unraisablehook, threading.main_thread().ident
    timers: list[threading.Timer] = []

    def again() -> None:
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def hook(dropped: Any, /) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)
            return
        timers.append(threading.Timer(_AGAIN_AFTER_S, again))
        timers[-1].daemon = True
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = report
        for timer in timers:
            timer.cancel()
