"""Requests from real and synthetic prompts: the right tokens, lengths, repetition, labels and determinism."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.workload import DatasetConfig, LengthStatistics, Workload, build_workload
from harness.workload.fit import LengthLimits
from harness.workload.tokens import Candidate

Make = Callable[..., DatasetConfig]
ROOT = Path(__file__).parents[3]
BASE = DatasetConfig(
    name="t", lengths=LengthStatistics(mean=20, max=60, source="none"), num_requests=8, max_new_tokens=4
)


def build(config: DatasetConfig, tokenizer: Any, seed: int = 0, max_positions: int = 4096) -> Workload:
    return build_workload(config, tokenizer, vocab_size=2048, max_positions=max_positions, seed=seed)


def lines(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_real_mtbench_first_turns_repeat(dataset: Make, tokenizer: Any, shared_data: Path) -> None:
    file = shared_data / "mt_bench_questions.jsonl"
    config = dataset(path=str(file), column="turns.0", num_requests=200)
    workload = build(config, tokenizer)
    turns = [json.loads(line)["turns"][0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    expected = [tokenizer(turn)["input_ids"] for turn in turns]
    assert [list(request.prompt_ids) for request in workload.requests] == (expected * 3)[:200]
    assert [request.text for request in workload.requests] == (turns * 3)[:200]
    assert [request.request_id for request in workload.requests] == list(range(200))
    assert {request.max_new_tokens for request in workload.requests} == {4}
    assert workload.total_prompt_tokens == sum(map(len, (expected * 3)[:200]))
    assert workload.mean_prompt_tokens == pytest.approx(workload.total_prompt_tokens / 200)
    assert workload.max_prompt_tokens == max(map(len, expected))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    repeated = f"{len(turns)} different, repeated to 200"
    assert workload.source == f"real: mt_bench_questions.jsonl, sha256 {digest[:16]}, {repeated}"
    assert not workload.is_synthetic


def test_real_gsm8k_repeated_to_a_length(dataset: Make, tokenizer: Any, shared_data: Path) -> None:
    limits: dict[str, Any] = {"min_prompt_tokens": 256, "max_prompt_tokens": 256, "on_too_long": "truncate"}
    recipe = {"path": str(shared_data / "gsm8k_test.jsonl"), "column": "question", "num_requests": 100}
    plain = build(dataset(**recipe), tokenizer).requests
    fixed = build(dataset(**recipe, **limits, on_too_short="repeat"), tokenizer)
    for before, after in zip(plain, fixed.requests, strict=True):
        expected = [before.prompt_ids[index % len(before.prompt_ids)] for index in range(256)]
        assert list(after.prompt_ids) == expected
    num_long = sum(len(request.prompt_ids) > 256 for request in plain)
    num_short = sum(len(request.prompt_ids) < 256 for request in plain)
    assert num_short > 50 and f"; {num_short} prompts repeated up to 256 tokens" in fixed.source
    assert (num_long == 0) or f"{num_long} prompt" in fixed.source


def test_synthetic_prompts_are_text_with_the_published_lengths(dataset: Make, tokenizer: Any) -> None:
    published = {"lengths.mean": 98, "lengths.max": 450, "lengths.min": 20, "lengths.source": "MoE-Lens, Table 3"}
    workload = build(dataset(num_requests=128, **published), tokenizer)
    assert workload.is_synthetic
    assert workload.source == (
        "synthetic: lengths drawn from published mean 98, max 450 (MoE-Lens, Table 3), made-up text"
    )
    assert workload.mean_prompt_tokens == pytest.approx(98, rel=0.03)
    assert 200 < workload.max_prompt_tokens <= 450
    for request in workload.requests:
        assert request.prompt_ids[0] == tokenizer.bos_token_id
        assert not set(request.prompt_ids[1:]) & set(tokenizer.all_special_ids)
        assert request.text == tokenizer.decode(request.prompt_ids[1:])
    assert len({request.prompt_ids for request in workload.requests}) > 120


def test_synthetic_list_repeats_like_the_published_one(dataset: Make, tokenizer: Any) -> None:
    requests = build(dataset(num_requests=25, **{"lengths.num_prompts": 10}), tokenizer).requests
    ids = [request.prompt_ids for request in requests]
    assert len(set(ids[:10])) == 10
    assert ids == (ids[:10] * 3)[:25]


def test_without_a_tokenizer_ids_are_uniform_and_ordinary(dataset: Make) -> None:
    workload = build(dataset(num_requests=300, synthetic="reasoning"), None)
    ids = [token for request in workload.requests for token in request.prompt_ids]
    assert min(ids) == 3 and max(ids) == 2047 and sum(ids) / len(ids) == pytest.approx(1025, rel=0.03)
    assert {request.text for request in workload.requests} == {None}
    assert workload.source.endswith("uniform token ids")


def test_reasoning_prompts_come_from_the_rule(dataset: Make, tokenizer: Any) -> None:
    workload = build(dataset(synthetic="reasoning", num_requests=5), tokenizer)
    assert workload.source.startswith("synthetic: generated by rule")
    for request in workload.requests:
        assert request.text is not None and request.text.endswith("Rule:")
        assert list(request.prompt_ids) == tokenizer(request.text)["input_ids"]


def test_truncation_is_cut_at_the_end_and_noted(dataset: Make, tokenizer: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", "a short one", "word " * 100)
    config = dataset(path=path, on_too_long="truncate", num_requests=2)
    whole, cut = build(config, tokenizer), build(config, tokenizer, max_positions=40)
    assert cut.requests[0] == whole.requests[0]
    assert cut.requests[1].prompt_ids == whole.requests[1].prompt_ids[:36]
    assert cut.requests[1].text == tokenizer.decode(cut.requests[1].prompt_ids[1:])
    assert cut.source.endswith("; 1 prompt cut to 36 tokens")


def test_short_prompts_are_left_out(dataset: Make, tokenizer: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", "x", "word " * 20, "y", "sentence " * 20)
    workload = build(dataset(path=path, min_prompt_tokens=10, num_requests=3), tokenizer)
    assert [request.text for request in workload.requests] == [
        ("word " * 20).strip(),
        ("sentence " * 20).strip(),
        ("word " * 20).strip(),
    ]
    assert workload.source.endswith("; 2 prompts left out below 10 tokens")


def test_rows_without_a_prompt_are_left_out_when_asked(dataset: Make, tokenizer: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", "", "kept", " ")
    workload = build(dataset(path=path, on_empty="skip", num_requests=2), tokenizer)
    assert [request.text for request in workload.requests] == ["kept", "kept"]
    assert workload.source.endswith("; 2 prompts left out, empty")


def test_first_rows_become_worked_examples(dataset: Make, tokenizer: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", "one", "two", "three", "four")
    recipe = {"num_shots": 2, "shot_template": "Q: {prompt}!\n", "template": "Q: {prompt}?"}
    workload = build(dataset(path=path, num_requests=2, **recipe), tokenizer)
    assert [request.text for request in workload.requests] == [
        "Q: one!\nQ: two!\nQ: three?",
        "Q: one!\nQ: two!\nQ: four?",
    ]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_longer_workload_begins_with_the_shorter_one(dataset: Make, tokenizer: Any, data: st.DataObject) -> None:
    longer = data.draw(st.integers(1, 60), "longer")
    shorter = data.draw(st.integers(1, longer), "shorter")
    overrides: dict[str, Any] = {
        "synthetic": data.draw(st.sampled_from(["lengths", "lengths", "reasoning"])),
        "lengths.shape": data.draw(st.sampled_from(["lognormal", "max_entropy"])),
        "lengths.num_prompts": data.draw(st.none() | st.integers(1, 80)),
        "min_prompt_tokens": data.draw(st.integers(1, 20)),
        "max_prompt_tokens": data.draw(st.integers(20, 400)),
        "on_too_short": data.draw(st.sampled_from(["skip", "repeat"])),
        "on_too_long": "truncate",
        "lengths.mean": 30,
    }
    used = data.draw(st.sampled_from([tokenizer, None]))
    seed = data.draw(st.integers(0, 2**40))
    config = dataset(num_requests=longer, **overrides)
    try:
        workload = build(config, used, seed)
    except ValueError as error:  # the few prompts of a short list may all be left out
        assert "no prompt" in str(error) and overrides["lengths.num_prompts"] is not None
        return
    requests = workload.requests
    assert build(dataset(num_requests=shorter, **overrides), used, seed).requests == requests[:shorter]
    lengths = {len(request.prompt_ids) for request in requests}
    assert overrides["min_prompt_tokens"] <= min(lengths) <= max(lengths) <= overrides["max_prompt_tokens"]


def test_seeds_differ(dataset: Make, tokenizer: Any) -> None:
    first, again, other = (build(dataset(), tokenizer, seed).requests for seed in (1, 1, 2))
    assert first == again != other


@settings(max_examples=150)
@given(data=st.data())
def test_allowed_lengths_hold_for_any_prompt(data: st.DataObject) -> None:
    shortest = data.draw(st.integers(1, 30))
    longest = data.draw(st.integers(shortest, 60))
    ids = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=90))
    rules: dict[str, Any] = {"on_too_short": data.draw(st.sampled_from(["skip", "repeat"])), "on_too_long": "truncate"}
    config = replace(BASE, min_prompt_tokens=shortest, max_prompt_tokens=longest, **rules)
    limits = LengthLimits.of(config, data.draw(st.integers(longest + 4, 100)))
    prompt = limits.apply(Candidate("here", ids, "text"))
    if prompt is None:
        assert len(ids) < shortest and rules["on_too_short"] == "skip"
    else:
        assert shortest <= len(prompt.ids) <= longest
        assert all(token == ids[index % len(ids)] for index, token in enumerate(prompt.ids))
        assert (prompt.text == "text") == (list(prompt.ids) == ids)


def test_jsonl_needs_no_heavy_library(tmp_path: Path) -> None:
    """Neither reading a jsonl file nor making prompts up loads torch, transformers, datasets or pyarrow."""
    program = f"""
import sys
from harness.workload import DatasetConfig, LengthStatistics, build_workload
from harness.workload.files import file_rows
lengths = LengthStatistics(mean=20, max=60, source="none")
config = DatasetConfig(name="t", lengths=lengths, num_requests=2, max_new_tokens=1)
build_workload(config, None, vocab_size=100, max_positions=100, seed=0)
assert len(list(file_rows({lines(tmp_path / "a.jsonl", "x")!r}))) == 1
print([name for name in ("torch", "transformers", "datasets", "pyarrow", "pandas") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ends_are_drawn_and_change_nothing_else(tmp_path: Path) -> None:
    plain = build(BASE, None)
    statistics = LengthStatistics(mean=30, max=200, source="a paper")
    drawn = build(replace(BASE, num_requests=256, output_lengths=statistics), None)
    ends = [request.ends_after for request in drawn.requests]
    assert sum(ends) / len(ends) == pytest.approx(30, rel=0.05) and min(ends) >= 1 and max(ends) <= 200
    assert [r.prompt_ids for r in drawn.requests[: len(plain.requests)]] == [r.prompt_ids for r in plain.requests]
    assert {request.max_new_tokens for request in drawn.requests} == {4} and plain.requests[0].ends_after is None
    assert drawn.source.endswith("; ends drawn from mean 30, max 200 (a paper)")

    path = tmp_path / "answers.json"
    path.write_text("[3, 70, 700]")
    listed = build(replace(BASE, num_requests=300, output_lengths_path=str(path)), None)
    ends = [request.ends_after for request in listed.requests]
    assert set(ends) == {3, 70, 700} and all(60 < ends.count(end) < 140 for end in set(ends))
    assert listed.source.endswith("; ends by lot from the 3 of answers.json")
    for text in ("[]", "[0]", "[1.5]", "{}", "[true]", "nothing"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"^dataset.output_lengths_path: .*answers.json"):
            build(replace(BASE, output_lengths_path=str(path)), None)
