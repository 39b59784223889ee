"""Runs that are right pass, runs with a planted fault do not. Every run really computes with the family functions."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_generator import Fault, PlainGenerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.model.checkpoint import Checkpoint
from harness.verify import reference
from harness.verify.oracle import verify
from harness.verify.records import Segment

NUM_TOKENS = 24
MODELS = ["tiny-float32", "tiny-bfloat16", "mini-like-bfloat16"]


def generate(checkpoint, prompts, fault=None, num_tokens=NUM_TOKENS, preempt_after=()):
    generator = PlainGenerator(checkpoint)
    return [generator.generate(i, ids, num_tokens, fault, preempt_after) for i, ids in enumerate(prompts)]


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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("preempt_after", [(), (5, 13)], ids=["undisturbed", "preempted"])
def test_right_runs_pass(checkpoint_of, prompts_of, model, preempt_after):
    checkpoint = checkpoint_of(model)
    sequences = generate(checkpoint, prompts_of(checkpoint), preempt_after=preempt_after)
    report = verify(checkpoint, sequences, eos=False)
    assert report.ok and report.first_mismatch is None and checkpoint.spec.dtype in report.mode
    assert (report.checked, report.tokens_checked, report.excused) == (4, 4 * NUM_TOKENS, 0)
    assert report.worst_gap < 0.08 and report.worst_router_gap < 0.015, "half the tolerance is left"


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


@pytest.mark.parametrize("model", ["tiny-float32", "tiny-bfloat16"])
def test_wrong_routes_are_caught_although_they_are_replayed(checkpoint_of, prompts_of, model):
    checkpoint = checkpoint_of(model)
    fault = Fault(routes=lambda layer, ids: torch.stack((ids[:, 0], (ids[:, 0] + 1) % 8), dim=1) if layer == 2 else ids)
    report = verify(checkpoint, generate(checkpoint, prompts_of(checkpoint), fault), eos=False)
    assert report.mismatched == 4 and "layer 2: chose experts" in report.first_mismatch


def edited(checkpoint, folder, change):
    """A copy of a one-file checkpoint with its tensors changed."""
    folder.mkdir()
    for path in checkpoint.folder.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(checkpoint.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(folder)


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
    report = verify(checkpoint, [went_on], eos=True)
    assert report.first_mismatch == f"request 0, generated token {end}: went on after end token 1"


def test_float32_weights_run_in_bfloat16_are_checked_with_rounded_weights(checkpoint_of, prompts_of):
    folder = checkpoint_of("tiny-float32").folder
    checkpoint = Checkpoint(folder, "bfloat16")
    report = verify(checkpoint, generate(checkpoint, prompts_of(checkpoint)), eos=False)
    assert report.ok and "bfloat16" in report.mode
    parameter = next(reference.reference_for(checkpoint)._model.parameters())
    assert torch.equal(parameter, parameter.bfloat16().float())


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


def test_references_are_cached_on_disk_by_prompt_and_served_shortened(checkpoint_of, cache, monkeypatch):
    checkpoint = checkpoint_of("tiny-float32", seed=11)
    oracle = reference.reference_for(checkpoint)
    long = oracle.generate([0, 50, 60], 12, eos=False)
    monkeypatch.setattr(oracle, "_generate", lambda *args: pytest.fail("generated again"))
    assert oracle.generate([0, 50, 60], 12, eos=False) == long
    assert oracle.generate([0, 50, 60], 5, eos=False) == long[:5]
    monkeypatch.undo()
    longer = oracle.generate([0, 50, 60], 15, eos=False)
    assert longer[:12] == long and len(longer) == 15

    (file,) = (cache / "references" / checkpoint.version()).glob("*/*.json")
    assert json.loads(file.read_text()) == {"prompt_ids": [0, 50, 60], "generated_ids": longer}
    file.write_text("damaged")
    assert oracle.generate([0, 50, 60], 15, eos=False) == longer
    assert oracle.generate([0, 50, 61], 12, eos=False) != long


def test_a_cache_that_cannot_be_written_costs_no_run(checkpoint_of, tmp_path, monkeypatch):
    checkpoint = checkpoint_of("tiny-float32")
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path))
    (tmp_path / "references").write_text("in the way")
    oracle = reference.Reference(checkpoint, checkpoint.version())
    assert len(oracle.generate([5, 6, 7], 3, eos=False)) == 3


def test_verification_is_quiet(checkpoint_of, prompts_of, capfd, recwarn):
    checkpoint = checkpoint_of("tiny-float32", seed=12)  # not loaded by any other test
    assert verify(checkpoint, generate(checkpoint, prompts_of(checkpoint)), eos=True).checked == 4
    out, err = capfd.readouterr()
    assert (out, err) == ("", "") and not recwarn.list


def test_long_contexts_take_the_fused_attention(checkpoint_of, prompts_of, monkeypatch):
    checkpoint = checkpoint_of("tiny-float32", seed=13)
    sequences = generate(checkpoint, prompts_of(checkpoint))
    monkeypatch.setattr(reference, "EAGER_ATTENTION_POSITIONS", 10)
    assert verify(checkpoint, sequences, eos=False).ok
    assert reference.reference_for(checkpoint)._model.config._attn_implementation == "sdpa"
