"""Convert a sequence of the engine to what the oracle checks. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.verify.records import GeneratedSequence, Segment

if TYPE_CHECKING:
    from harness.engine.sequences import Sequence


def generated_sequence(sequence: Sequence) -> GeneratedSequence:
    """Convert a finished sequence whose routing was recorded."""
    assert sequence.records is not None, f"request {sequence.request.request_id}: its routing was not recorded"
    return GeneratedSequence(
        request_id=sequence.request.request_id,
        prompt_ids=sequence.request.prompt_ids,
        generated_ids=sequence.generated,
        segments=[
            Segment(first_generated_index=life.first_generated, routing=np.concatenate(life.routing))
            for life in sequence.lives
        ],
    )
