"""Keep what ran on a machine as packed rows, from which spans are made when asked for, as a run is long."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, MutableSequence
from struct import Struct
from typing import Any, overload

import numpy as np

from harness.machine.base import Lane, Span, Work

NONE = -1  # of a layer or micro-batch that an op does not have
_COLUMNS = (
    ("ticket", "i8"), ("start_s", "f8"), ("end_s", "f8"), ("cpu_s", "f8"), ("flops", "f8"), ("device_bytes", "f8"),
    ("host_bytes", "f8"), ("link_bytes", "f8"), ("layer", "i4"), ("micro_batch", "i4"), ("packet", "i4"),
    ("num_packets", "i4"), ("lane", "u2"), ("kind", "u2"), ("urgent", "?"),
)  # fmt: skip
_DTYPE = np.dtype(list(_COLUMNS), align=True)
_ROW = Struct("=qdddddddiiiiHH?3x")
assert _ROW.size == _DTYPE.itemsize
_ROWS_A_CHUNK = 1 << 12


class SpanSequence(MutableSequence[Span]):
    """A sequence of spans as a machine records them. It cannot be edited, only cleared."""

    @abstractmethod
    def columns(self, first: int = 0) -> tuple[np.ndarray, list[Lane], list[str]]:
        """Return a copy of the rows from number `first` on, structured, and what their lane and kind codes mean."""

    @abstractmethod
    def _spans(self, first: int, last: int) -> Iterator[Span]: ...

    def __iter__(self) -> Iterator[Span]:
        return self._spans(0, len(self))

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> MutableSequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | MutableSequence[Span]:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return next(self._spans(numbers, numbers + 1))
        if numbers.step == 1:
            return list(self._spans(numbers.start, numbers.stop))
        return [next(self._spans(number, number + 1)) for number in numbers]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Iterable) and list(self) == list(other)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("spans are recorded by the machine and cannot be edited")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("spans can only be cleared, all of them")

    def insert(self, index: int, value: Span) -> None:
        raise TypeError("spans are recorded by the machine and cannot be edited")


class PackedSpans(SpanSequence):
    """Spans of lanes that are threads, 88 bytes each. One thread at a time appends; others may read meanwhile."""

    def __init__(self) -> None:
        self._chunks: list[bytearray] = []
        self._length = 0
        self._lanes: dict[Lane, int] = {}
        self._kinds: dict[str, int] = {}

    def append(self, span: Span) -> None:
        chunk, row = divmod(self._length, _ROWS_A_CHUNK)
        if chunk == len(self._chunks):
            self._chunks.append(bytearray(_ROWS_A_CHUNK * _ROW.size))
        _ROW.pack_into(
            self._chunks[chunk], row * _ROW.size, span.ticket, span.start_s, span.end_s, span.cpu_s, *span.work,
            NONE if span.layer is None else span.layer, NONE if span.micro_batch is None else span.micro_batch,
            span.packet, span.num_packets, self._lanes.setdefault(span.lane, len(self._lanes)),
            self._kinds.setdefault(span.kind, len(self._kinds)), span.urgent,
        )  # fmt: skip
        self._length += 1  # last: whoever reads meanwhile sees whole rows

    def columns(self, first: int = 0) -> tuple[np.ndarray, list[Lane], list[str]]:
        length = self._length
        chunks = self._chunks[first // _ROWS_A_CHUNK : -(-length // _ROWS_A_CHUNK)]
        rows = np.empty(len(chunks) * _ROWS_A_CHUNK, _DTYPE)
        for number, chunk in enumerate(chunks):
            rows[number * _ROWS_A_CHUNK : (number + 1) * _ROWS_A_CHUNK] = np.frombuffer(chunk, _DTYPE)
        skipped = first // _ROWS_A_CHUNK * _ROWS_A_CHUNK
        return rows[first - skipped : length - skipped], list(self._lanes), list(self._kinds)

    def _spans(self, first: int, last: int) -> Iterator[Span]:
        lanes, kinds = list(self._lanes), list(self._kinds)
        for number in range(first, last):
            chunk, row = divmod(number, _ROWS_A_CHUNK)
            values = _ROW.unpack_from(self._chunks[chunk], row * _ROW.size)
            ticket, start_s, end_s, cpu_s, *work, layer, batch, packet, count, lane, kind, urgent = values
            yield Span(
                lanes[lane], kinds[kind], None if layer == NONE else layer, None if batch == NONE else batch, ticket,
                packet, count, urgent, start_s, end_s, cpu_s, Work(*work),
            )  # fmt: skip

    def __len__(self) -> int:
        return self._length

    def clear(self) -> None:
        self._length = 0
        self._chunks.clear()
