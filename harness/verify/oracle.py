"""`verify`: are these the tokens that Hugging Face transformers gives for the same checkpoint?

float32: `generate`, token for token. Where a sequence diverges, it is replayed teacher-forced with its recorded
routing, and the divergence is excused only if the replay explains it by choices within rounding of each other.

bfloat16 and float16: a free-running comparison proves nothing, since rounding flips a route for every seventh token or
so (in bfloat16) and the texts part. So a float32 copy of the reference is fed the run's own tokens with the run's own
routing replayed, and every token and every expert chosen must be a near-best choice there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from harness.model.checkpoint import Checkpoint
from harness.model.spec import ModelSpec
from harness.verify.records import GeneratedSequence, Segment, VerifyReport
from harness.verify.reference import NotFiniteError, Reference, RouterScores, reference_for


@dataclass(frozen=True)
class Tolerance:
    token_gap: float  # below the reference's best logit, in standard deviations of the logits
    router_gap: float  # below the reference's k-th best expert, as a share of that expert's score


TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5),
    "bfloat16": Tolerance(0.15, 0.15),
    "float16": Tolerance(0.02, 0.02),  # three bits more than bfloat16: an eighth of its rounding
}
MODES = {
    "float32": "float32, Hugging Face generate",
    "bfloat16": "bfloat16, teacher-forced with replayed routing",
    "float16": "float16, teacher-forced with replayed routing",
}


@dataclass
class _Findings:
    """The findings of the check of one sequence."""

    mismatches: list[str] = field(default_factory=list)
    excused: bool = False  # it diverges, and choices within rounding explain that
    near_tie: bool = False  # a token below the reference's best, within the tolerance
    worst_gap: float = 0.0
    worst_router_gap: float = 0.0
    top_two_gaps: list[float] = field(default_factory=list)  # by generated token: best against second best
    rerouted: bool = False  # an expert that the reference would not have chosen, within the tolerance


def verify(checkpoint: Checkpoint, sequences: Sequence[GeneratedSequence], *, eos: bool) -> VerifyReport:
    """Check every sequence that generated anything; `eos` says whether the run stopped at the end token.

    Raises `ValueError` naming the request whose recorded routing does not have the shape its lives need.
    """
    reference, dtype = reference_for(checkpoint), checkpoint.spec.dtype
    checked = [sequence for sequence in sequences if len(sequence.generated_ids)]
    findings = []
    for sequence in checked:
        findings.append(_check(reference, sequence, eos))
    return VerifyReport(
        mode=MODES[dtype],
        checked=len(checked),
        tokens_checked=sum(len(sequence.generated_ids) for sequence in checked),
        mismatched=sum(bool(found.mismatches) for found in findings),
        excused=sum(found.excused for found in findings),
        worst_gap=_worst(*(found.worst_gap for found in findings)),
        worst_router_gap=_worst(*(found.worst_router_gap for found in findings)),
        first_mismatch=next((text for found in findings for text in found.mismatches), None),
    )


def _worst(*gaps: float) -> float:
    """Return the largest gap, zero without any; NaN where one of them is NaN, which `max` would hide."""
    return float(np.max([0.0, *gaps]))


def _check(reference: Reference, sequence: GeneratedSequence, eos: bool) -> _Findings:
    found = _past_the_end(reference, sequence) if eos else _Findings()
    if found.mismatches:
        return found
    check = _check_float32 if reference.spec.dtype == "float32" else _check_rounded
    try:
        return check(reference, sequence)
    except NotFiniteError as error:
        return _Findings(mismatches=[f"request {sequence.request_id}: {error}"], worst_gap=math.nan)


def _past_the_end(reference: Reference, sequence: GeneratedSequence) -> _Findings:
    eos_id, ids = reference.spec.eos_token_id, list(sequence.generated_ids)
    if eos_id in ids[:-1]:
        index = ids.index(eos_id)
        text = f"request {sequence.request_id}, generated token {index + 1}: went on after end token {eos_id}"
        return _Findings(mismatches=[text])
    return _Findings()


def _check_float32(reference: Reference, sequence: GeneratedSequence) -> _Findings:
    got = list(sequence.generated_ids)
    expected = reference.generate(sequence.prompt_ids, len(got))
    if got == expected:
        return _Findings()
    index = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    tolerance = TOLERANCES["float32"]
    found = _check_lives(reference, sequence, tolerance)
    if not found.mismatches:
        until = _check_lives(reference, _cut_after(sequence, index), tolerance)  # what comes later explains nothing
        found.excused = until.rerouted or until.near_tie or until.top_two_gaps[index] < tolerance.token_gap
        if not found.excused:
            found.mismatches.append(
                f"request {sequence.request_id}, generated token {index}: expected {expected[index]}, "
                f"got {got[index]}, and no choice within rounding explains it"
            )
    return found


def _check_rounded(reference: Reference, sequence: GeneratedSequence) -> _Findings:
    """Check a bfloat16 or float16 sequence: here the tolerance is the test itself, not an exception to it."""
    return _check_lives(reference, sequence, TOLERANCES[reference.spec.dtype])


def _cut_after(sequence: GeneratedSequence, index: int) -> GeneratedSequence:
    """Return the sequence as it was when it had generated token `index`."""
    return GeneratedSequence(
        request_id=sequence.request_id,
        prompt_ids=sequence.prompt_ids,
        generated_ids=sequence.generated_ids[: index + 1],
        segments=[segment for segment in sequence.segments if segment.first_generated_index <= index],
    )


def _check_lives(reference: Reference, sequence: GeneratedSequence, tolerance: Tolerance) -> _Findings:
    """Check, teacher-forced, the tokens of each life of the KV cache, in the context and with the routing of that
    life."""
    found, num_prompt = _Findings(), len(sequence.prompt_ids)
    all_ids = [*sequence.prompt_ids, *sequence.generated_ids]
    for segment, first, end in sequence.lives():
        token_ids = all_ids[: num_prompt + end - 1]
        routing = _recorded_routing(reference, sequence, segment, len(token_ids))
        if impossible := _impossible_choice(reference, routing):
            found.mismatches.append(f"request {sequence.request_id}, {impossible}")
            break
        replay = reference.replay(token_ids, routing, first_logit=num_prompt + first - 1)
        _compare_routing(reference.spec, sequence, routing.transpose(0, 1), replay.routers, tolerance, found)
        _compare_tokens(sequence, first, replay.logits, tolerance, found)
    return found


def _recorded_routing(
    reference: Reference, sequence: GeneratedSequence, segment: Segment, num_positions: int
) -> Tensor:
    """Return the recorded routing, int64 [positions, layers with a router, k]."""
    spec, shape = reference.spec, segment.routing.shape
    if len(shape) != 3 or shape[0] < num_positions or shape[1:] != (spec.num_moe_layers, spec.experts_per_token):
        needed = f"[>= {num_positions}, {spec.num_moe_layers}, {spec.experts_per_token}]"
        raise ValueError(f"request {sequence.request_id}: routing: must have shape {needed}, got {list(shape)}")
    return torch.from_numpy(segment.routing[:num_positions].astype("int64"))


def _impossible_choice(reference: Reference, routing: Tensor) -> str:
    """Describe the first expert id outside the model, or the first expert that a token has twice; empty if there is
    none."""
    ordered = routing.sort(dim=-1).values
    wrong = (ordered[..., 0] < 0) | (ordered[..., -1] >= reference.spec.num_experts)
    wrong |= (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    for position, at in wrong.nonzero()[:1].tolist():
        layer = reference.spec.moe_layers[at]
        return f"position {position}, layer {layer}: impossible experts {routing[position, at].tolist()}"
    return ""


def _compare_routing(
    spec: ModelSpec,
    sequence: GeneratedSequence,
    chosen: Tensor,
    routers: RouterScores,
    tolerance: Tolerance,
    found: _Findings,
) -> None:
    """Compare chosen [layers with a router, positions, k] with what the reference's routers chose by."""
    best = routers.choice.topk(chosen.shape[-1], dim=-1)
    unit = routers.measure.gather(-1, best.indices[..., -1:])[..., 0]  # [layers, positions]
    shortfall = best.values[..., -1] - routers.choice.gather(-1, chosen).amin(dim=-1)
    of_groups = routers.group_shortfall / spec.router.group_score_experts
    gaps = (torch.maximum(shortfall, of_groups) / unit).clamp(min=0)
    found.rerouted |= bool((chosen.sort().values != best.indices.sort().values).any())
    found.worst_router_gap = _worst(found.worst_router_gap, gaps.max().item())
    for at, position in (~(gaps <= tolerance.router_gap)).nonzero()[:1].tolist():
        found.mismatches.append(
            f"request {sequence.request_id}, position {position}, layer {spec.moe_layers[at]}: chose experts "
            f"{chosen[at, position].tolist()}, {gaps[at, position]:.3g} of the router's score below the "
            f"reference's {best.indices[at, position].tolist()}"
        )


def _compare_tokens(
    sequence: GeneratedSequence, first: int, logits: Tensor, tolerance: Tolerance, found: _Findings
) -> None:
    """Compare tokens with logits [tokens of this life, vocab]: the i-th row is what the reference says generated token
    first + i is."""
    ids = torch.tensor(list(sequence.generated_ids)[first : first + logits.shape[0]])
    best = logits.topk(2, dim=-1)
    std = logits.std(dim=-1)
    gaps = (best.values[:, 0] - logits.gather(-1, ids[:, None])[:, 0]) / std
    found.top_two_gaps += ((best.values[:, 0] - best.values[:, 1]) / std).tolist()
    found.worst_gap = _worst(found.worst_gap, gaps.max().item())
    found.near_tie |= bool(((gaps > 0) & (gaps <= tolerance.token_gap)).any())
    for (row,) in (~(gaps <= tolerance.token_gap)).nonzero()[:1].tolist():  # NaN, too
        found.mismatches.append(
            f"request {sequence.request_id}, generated token {first + row}: expected {best.indices[row, 0].item()}, "
            f"got {ids[row].item()}, {gaps[row]:.3g} logit standard deviations below"
        )
