"""Buffers that share bytes, against a comparison of every pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.machine.overlaps import Overlaps
from harness.memory.tiers import Buffer

_RANGES = st.tuples(st.integers(0, 40), st.integers(0, 12))


def share_a_byte(known: Buffer, asked: Buffer) -> bool:
    """Tell whether a known buffer reaches into the one that is asked for, or begins in it. An empty buffer has no byte
    of its own, but may lie within another one."""
    first, behind = asked.offset_bytes, asked.offset_bytes + asked.nbytes
    return known.offset_bytes < behind and known.offset_bytes + known.nbytes > first


@given(ranges=st.lists(_RANGES, max_size=14), apart=st.booleans(), removed=st.sets(st.integers(0, 13)))
def test_all_known_buffers_that_share_a_byte_are_found(ranges: list[tuple[int, int]], apart: bool, removed: set[int]):
    root, overlaps, known = Buffer("device", "root", 1000), Overlaps(), list[Buffer]()
    for number, (offset, nbytes) in enumerate(ranges):
        offset = offset if not apart else 13 * (7 * number % len(ranges))
        buffer = root.sub(str(number), offset, nbytes)
        assert set(overlaps.add(buffer)) == {other for other in known if share_a_byte(other, buffer)}
        known.append(buffer)
        if number in removed:
            known.remove(buffer)
            overlaps.remove(buffer)
        for asked in known:
            assert set(overlaps.of(asked)) == {o for o in known if o is not asked and share_a_byte(o, asked)}
