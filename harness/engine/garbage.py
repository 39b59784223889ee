"""Spare Python the search for unreachable cycles where very many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OBJECTS = 700_000  # made and not gone: a step of many micro-batches has hundreds of thousands under way


@contextmanager
def collecting_rarely(objects: int = _OBJECTS) -> Iterator[None]:
    """Let Python search for unreachable cycles once so many objects were made and are not gone. Ops and tickets are
    gone when nobody refers to them; searching takes a fifth of the time in which they are submitted or recorded."""
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], objects), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def let_go(*holders: Any) -> None:
    """Make objects that nobody will use again forget all they hold. Engines, machines and what is built on them refer
    to each other, so that all that they hold would be gone only when Python searches for it."""
    for each in holders:
        vars(each).clear()
