import numpy as np
import pytest

from harness.verify.records import GeneratedSequence, Segment, VerifyReport


def sequence(starts, num_generated=10):
    segments = [Segment(first_generated_index=i, routing=np.zeros((1, 1, 1), np.int16)) for i in starts]
    return GeneratedSequence(request_id=4, prompt_ids=[1], generated_ids=list(range(num_generated)), segments=segments)


def test_lives_cover_the_generated_tokens_once():
    ranges = [(first, end) for _, first, end in sequence([0, 3, 3, 10]).lives()]
    assert ranges == [(0, 3), (3, 10)]


@pytest.mark.parametrize("starts", [[], [1], [0, 5, 4], [0, 11]])
def test_impossible_segments_name_the_request(starts):
    with pytest.raises(ValueError, match="request 4: segments: must start at 0 and ascend within 10 generated tokens"):
        sequence(starts)


def test_a_report_is_ok_without_mismatches():
    fields = {"mode": "m", "checked": 1, "tokens_checked": 9, "excused": 3, "worst_gap": 0.1, "worst_router_gap": 0.0}
    assert VerifyReport(**fields, mismatched=0).ok and not VerifyReport(**fields, mismatched=1).ok
