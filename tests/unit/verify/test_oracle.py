"""Runs that are right pass, runs with a planted fault do not. Every run really computes with the family functions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_generator import NUM_TOKENS, Fault, PlainGenerator, edited, generate
from transformers import AutoModelForCausalLM

from harness.verify.oracle import TOLERANCES, verify
from harness.verify.records import Segment

MODELS = ["tiny-float32", "tiny-bfloat16", "mini-like-bfloat16"]


def hf_greedy(checkpoint, prompts):
    """With transformers' default attention and experts, apart from the harness's own way to call it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, attention_mask=torch.ones_like(ids))
        yield out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("overrides", [{}, {"sliding_window": 16}, {"tie_embeddings": True}], ids=str)
def test_plain_generator_equals_hugging_face_generate(checkpoint_of, prompts_of, overrides):
    checkpoint = checkpoint_of("tiny-float32", **overrides)
    prompts = prompts_of(checkpoint)
    sequences = generate(checkpoint, prompts)
    assert [sequence.generated_ids for sequence in sequences] == list(hf_greedy(checkpoint, prompts))
    report = verify(checkpoint, sequences, eos=False)
    assert (report.checked, report.mismatched, report.excused) == (4, 0, 0)


@pytest.mark.parametrize("model", [*MODELS, "tiny-float16"])
@pytest.mark.parametrize("preempt_after", [(), (5, 13)], ids=["undisturbed", "preempted"])
def test_right_runs_pass(checkpoint_of, prompts_of, model, preempt_after):
    checkpoint = checkpoint_of(model)
    sequences = generate(checkpoint, prompts_of(checkpoint), preempt_after=preempt_after)
    report = verify(checkpoint, sequences, eos=False)
    assert report.ok and report.first_mismatch is None and checkpoint.spec.dtype in report.mode
    assert (report.checked, report.tokens_checked, report.excused) == (4, 4 * NUM_TOKENS, 0)
    tolerance = TOLERANCES[checkpoint.spec.dtype]
    assert report.worst_gap <= tolerance.token_gap / 2, "half the tolerance is left"
    assert report.worst_router_gap <= tolerance.router_gap / 2


def stale_expert(layer, expert):
    """A buffer slot still holds the layer before."""
    return (1, expert) if (layer, expert) == (2, 3) else (layer, expert)


def swapped_experts(layer, expert):
    return (layer, {2: 5, 5: 2}.get(expert, expert)) if layer == 1 else (layer, expert)


def shifted_position(position):
    """Decode steps count from one too many."""
    return position + 1 if position >= 14 else position


def dropped_kv_block(layer, k, v):
    """Block 0 of one layer has been given away."""
    return (k[:, 16:], v[:, 16:]) if layer == 1 and k.shape[1] > 16 else (k, v)


FAULTS = {
    "stale expert": Fault(expert_weights=stale_expert),
    "swapped experts": Fault(expert_weights=swapped_experts),
    "shifted position": Fault(position=shifted_position),
    "dropped KV block": Fault(kv=dropped_kv_block),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(checkpoint_of, prompts_of, model, fault):
    checkpoint = checkpoint_of(model)
    report = verify(checkpoint, generate(checkpoint, prompts_of(checkpoint), FAULTS[fault]), eos=False)
    assert not report.ok and report.mismatched >= 2
    assert report.first_mismatch.startswith("request ")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("layer", "part", "norm"),
    [(2, "attention_in", "input_norm"), (2, "attention_out", "post_norm"), (None, "head", "final_norm")],
)
def test_a_norm_without_its_weights_is_caught(checkpoint_of, prompts_of, model, layer, part, norm):
    checkpoint = checkpoint_of(model)
    generator = PlainGenerator(checkpoint)
    generator.weights[layer, part][norm].fill_(1.0)
    sequences = [generator.generate(i, ids, NUM_TOKENS) for i, ids in enumerate(prompts_of(checkpoint))]
    assert not verify(checkpoint, sequences, eos=False).ok


def test_another_epsilon_of_the_norms_is_caught(checkpoint_of, prompts_of):
    checkpoint = checkpoint_of("tiny-float32")
    for eps in (1e-5, 0.2):
        generator = PlainGenerator(checkpoint)
        generator.spec = replace(checkpoint.spec, norm_eps=eps)
        sequences = [generator.generate(i, ids, NUM_TOKENS) for i, ids in enumerate(prompts_of(checkpoint))]
        assert verify(checkpoint, sequences, eos=False).mismatched >= 2


def test_one_wrong_token_is_caught_and_named(checkpoint_of, prompts_of):
    """Even though everything after it follows from it, as after a wrong sample."""
    checkpoint = checkpoint_of("tiny-float32")
    prompt = prompts_of(checkpoint)[0]
    right = generate(checkpoint, [prompt])[0].generated_ids
    steps = iter(range(NUM_TOKENS))

    def second_best_once(logits):
        return int(logits.topk(2).indices[1 if next(steps) == 6 else 0])

    wrong = generate(checkpoint, [prompt], Fault(pick=second_best_once))
    report = verify(checkpoint, wrong, eos=False)
    got = wrong[0].generated_ids[6]
    assert got != right[6]
    assert report.first_mismatch.startswith(f"request 0, generated token 6: expected {right[6]}, got {got}, ")
    assert report.mismatched == 1 and report.excused == 0 and report.worst_gap > 1e-5


@pytest.mark.parametrize("model", ["tiny-float32", "tiny-bfloat16", "tiny-float16"])
def test_wrong_routes_are_caught_although_they_are_replayed(checkpoint_of, prompts_of, model):
    checkpoint = checkpoint_of(model)
    fault = Fault(routes=lambda layer, ids: torch.stack((ids[:, 0], (ids[:, 0] + 1) % 8), dim=1) if layer == 2 else ids)
    report = verify(checkpoint, generate(checkpoint, prompts_of(checkpoint), fault), eos=False)
    assert report.mismatched == 4 and "layer 2: chose experts" in report.first_mismatch


def test_ties_between_tokens_are_excused_and_counted(checkpoint_of, prompts_of, tmp_path):
    base = checkpoint_of("tiny-float32")
    prompt = prompts_of(base)[0]
    token = generate(base, [prompt])[0].generated_ids[5]
    twin = token + 1 if token + 1 < base.spec.vocab_size else token - 1

    def make_twin(tensors):
        tensors["lm_head.weight"][twin] = tensors["lm_head.weight"][token]

    checkpoint = edited(base, tmp_path / "twins", make_twin)
    first_choice = Fault(pick=lambda logits: int((logits == logits.max()).nonzero()[0]))
    other_choice = Fault(pick=lambda logits: int((logits == logits.max()).nonzero()[-1]))
    reports = [verify(checkpoint, generate(checkpoint, [prompt], f), eos=False) for f in (first_choice, other_choice)]
    assert all(report.ok for report in reports)
    assert sorted(report.excused > 0 for report in reports) == [False, True]


def test_ties_between_experts_are_excused_and_counted(checkpoint_of, prompts_of, tmp_path):
    """Experts 2 and 5 of layer 1 have the same router row and different weights."""

    def make_twin(tensors):
        router = tensors["model.layers.1.block_sparse_moe.gate.weight"]
        router[5] = router[2]

    base = checkpoint_of("tiny-float32")
    checkpoint = edited(base, tmp_path / "twins", make_twin)
    prompts = prompts_of(base)

    def swap_twins(layer, ids):
        """Only where one of the two was chosen; where both were, the choice was no tie at the boundary."""
        has_two, has_five = ((ids == expert).any(dim=1, keepdim=True) for expert in (2, 5))
        swapped = torch.where(ids == 2, 5, torch.where(ids == 5, 2, ids))
        return torch.where(has_two ^ has_five, swapped, ids) if layer == 1 else ids

    right = verify(checkpoint, generate(checkpoint, prompts), eos=False)
    tied = verify(checkpoint, generate(checkpoint, prompts, Fault(routes=swap_twins)), eos=False)
    assert right.ok and right.excused == 0
    assert tied.ok and tied.excused >= 1, tied.first_mismatch

    # The recorded tie excuses what follows from it, nothing else.
    sequences = generate(checkpoint, prompts, Fault(routes=swap_twins, expert_weights=stale_expert))
    assert not verify(checkpoint, sequences, eos=False).ok


def end_token_variant(checkpoint, prompt, folder):
    """The end token wins wherever the fifth generated token would have."""
    token = generate(checkpoint, [prompt])[0].generated_ids[5]

    def favour_end(tensors):
        tensors["lm_head.weight"][checkpoint.spec.eos_token_id] = 1.01 * tensors["lm_head.weight"][token]

    return edited(checkpoint, folder, favour_end)


@pytest.mark.parametrize("model", ["tiny-float32", "tiny-bfloat16"])
def test_end_token(checkpoint_of, prompts_of, tmp_path, model):
    base = checkpoint_of(model)
    prompt = prompts_of(base)[0]
    checkpoint = end_token_variant(base, prompt, tmp_path / "ending")
    went_on = generate(checkpoint, [prompt])[0]
    end = went_on.generated_ids.index(checkpoint.spec.eos_token_id) + 1
    assert end < NUM_TOKENS
    assert verify(checkpoint, [went_on], eos=False).ok
    stopped = replace(went_on, generated_ids=went_on.generated_ids[:end])
    assert verify(checkpoint, [stopped], eos=True).ok and verify(checkpoint, [stopped], eos=False).ok
    for length in (end + 1, NUM_TOKENS):
        longer = replace(went_on, generated_ids=went_on.generated_ids[:length])
        report = verify(checkpoint, [longer], eos=True)
        assert report.first_mismatch == f"request 0, generated token {end}: went on after end token 1"


def test_routing_of_the_wrong_shape_names_the_request(checkpoint_of, prompts_of):
    checkpoint = checkpoint_of("tiny-bfloat16")
    sequence = generate(checkpoint, prompts_of(checkpoint)[:1])[0]
    routing = sequence.segments[0].routing
    for wrong in (routing[:-1], routing[:, :-1], routing[..., :1], routing[0]):
        bad = replace(sequence, request_id=9, segments=[Segment(first_generated_index=0, routing=wrong)])
        with pytest.raises(ValueError, match=r"request 9: routing: must have shape \[>= \d+, 4, 2\], got"):
            verify(checkpoint, [bad], eos=False)
    longer = np.concatenate([routing, routing[:3]])  # fed once more than sampled: as a run that overshoots records
    assert verify(
        checkpoint, [replace(sequence, segments=[Segment(first_generated_index=0, routing=longer)])], eos=False
    ).ok


@pytest.mark.parametrize("experts", [(3, 3), (-1, 2), (0, 8)])
def test_impossible_experts_are_a_mismatch(checkpoint_of, prompts_of, experts):
    checkpoint = checkpoint_of("tiny-bfloat16")
    sequence = generate(checkpoint, prompts_of(checkpoint)[:1])[0]
    sequence.segments[0].routing[7, 2] = experts
    report = verify(checkpoint, [sequence], eos=False)
    assert report.first_mismatch == f"request 0, position 7, layer 2: impossible experts {list(experts)}"


def test_sequences_without_tokens_do_not_count_as_checked(checkpoint_of, prompts_of):
    checkpoint = checkpoint_of("tiny-float32")
    sequence = generate(checkpoint, prompts_of(checkpoint)[:1])[0]
    empty = replace(sequence, generated_ids=[])
    assert verify(checkpoint, [empty], eos=False).checked == 0
    assert verify(checkpoint, [], eos=True).ok
