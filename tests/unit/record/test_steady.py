"""The rate of passes that only decode, against passes written down."""

from __future__ import annotations

import pytest

from harness.record.passes import PassRecord
from harness.record.steady import EnoughPasses, require_more, steady_decode


def passes(*seconds_and_prefill: tuple[float, int]) -> list[PassRecord]:
    """Make passes one behind the other, of 10 sequences each."""
    made, at_s = [], 5.0
    for index, (seconds, prefilled) in enumerate(seconds_and_prefill):
        made.append(
            PassRecord(
                index=index,
                start_s=at_s,
                end_s=at_s + seconds,
                num_prefill_tokens=prefilled,
                generated_tokens=10,
                num_decode_tokens=10,
            )
        )
        at_s += seconds
    return made


def test_the_first_pass_behind_a_prefill_does_not_count():
    found = steady_decode(passes((9, 100), (5, 0), (1, 0), (3, 0)))
    assert found == {"passes": 2, "pass_s": 2.0, "tok_s": 5.0}


def test_the_last_row_counts_wherever_it_lies():
    assert steady_decode(passes((1, 0), (2, 0), (9, 8), (4, 0), (1, 0), (7, 3)))["tok_s"] == 10.0
    assert steady_decode(passes((9, 8), (4, 0))) is None
    assert steady_decode([]) is None


def test_a_run_has_enough_once_so_many_came_in_a_row():
    row = passes((1, 0), (1, 0), (9, 8), (1, 0), (1, 0), (1, 0))
    for count in range(len(row)):
        require_more(row[:count], 2)
    with pytest.raises(EnoughPasses, match="after 2 passes in a row that only decode, and one before them"):
        require_more(row, 2)
    require_more(row, None)
