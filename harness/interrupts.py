"""Ctrl-C and SIGTERM: each ends what runs with an exception, so that it is recorded; a second one ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

INTERRUPTED, TERMINATED = 130, 143  # exit codes, as shells have them
_AGAIN_AFTER_S = 0.05  # the finaliser has returned by then; where not, the interrupt is dropped and sent once more


class Terminated(KeyboardInterrupt):
    """SIGTERM came, as from Slurm, `docker stop` or `timeout`: it ends a run as Ctrl-C does."""


_RAISED: dict[int, type[KeyboardInterrupt]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
_active = False  # within a block of `interrupts_kept`


def exit_code(command: Callable[[], int]) -> int:
    """Return the exit code of `command`, whose traceback at Ctrl-C or SIGTERM would tell a user nothing."""
    try:
        with interrupts_kept():
            return command()
    except KeyboardInterrupt as interruption:
        return told(interruption)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, also where a lane's thread is stuck in native code.

    The interpreter would end such threads while they hold C++ frames, and so abort.
    """
    stuck = [thread for thread in threading.enumerate() if thread.daemon and "lane " in thread.name]
    if not stuck:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def told(interruption: KeyboardInterrupt) -> int:
    """Say in a line what ended the command, and where its records are if the interruption knows; return the exit
    code."""
    folder = f"; what was recorded: {interruption}" if str(interruption) else ""
    print(f"{word(interruption)}{folder}", file=sys.stderr)
    return TERMINATED if isinstance(interruption, Terminated) else INTERRUPTED


def word(interruption: KeyboardInterrupt) -> str:
    """Say what happened, for messages and records."""
    return "terminated" if isinstance(interruption, Terminated) else "interrupted"


def interruption_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interruption in whose handling `error` was raised, if any.

    Code that an interrupt cuts in two may trip over what it left half done, and its error takes the interrupt's place.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C and `Terminated` at SIGTERM, on the main thread within the block, whenever they
    come. The next of either ends the process at once. Signals that the process ignores or handles stay as they are.

    Python raises an interrupt wherever the main thread is; in a finaliser or a weak reference's callback, it only
    reports the exception, to `sys.unraisablehook`. Then the signal is sent again. A block within another changes
    nothing.
    """
    global _active
    if _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _RAISED}
    kept = [number for number, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    report, timers = sys.unraisablehook, []

    def hook(dropped: Any, /) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)
            return
        _handle(kept, _raise)
        number = signal.SIGTERM if issubclass(dropped.exc_type, Terminated) else signal.SIGINT
        timers.append(threading.Timer(_AGAIN_AFTER_S, _send_to_main_thread, [number]))
        timers[-1].daemon = True
        timers[-1].start()

    def _raise(number: int, frame: Any) -> None:
        _handle(kept, signal.SIG_DFL)
        raise _RAISED[number]

    _active, sys.unraisablehook = True, hook
    _handle(kept, _raise)
    try:
        yield
    finally:
        _active, sys.unraisablehook = False, report
        for number in kept:
            signal.signal(number, before[number])
        for timer in timers:
            timer.cancel()


def _handle(numbers: list[int], handler: Any) -> None:
    for number in numbers:
        signal.signal(number, handler)


def _send_to_main_thread(number: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)
