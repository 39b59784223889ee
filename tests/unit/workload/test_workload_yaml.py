"""Every file of conf/dataset composes, parses, builds, and says what its paper says."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness.config import ConfigError, parse
from harness.workload import DatasetConfig, Workload, build_workload

FOLDER = Path(__file__).parents[3] / "conf"
NAMES = sorted(path.stem for path in (FOLDER / "dataset").glob("*.yaml") if path.stem not in ("_base", "file"))


class Published(NamedTuple):
    mean: float
    max: int
    max_new_tokens: int
    paper: str


PUBLISHED = {
    "mtbench": Published(98, 450, 32, "MoE-Lens"),
    "mtbench_lightning": Published(77, 418, 32, "MoE-Lightning"),
    "rag12000": Published(926, 1843, 128, "MoE-Lens"),
    "aime2024": Published(128, 410, 512, "MoE-Lens"),
    "synthetic_reasoning": Published(242, 256, 50, "MoE-Lightning"),
    "summarization": Published(1693, 1984, 64, "MoE-Lightning"),
    "mmlu": Published(512, 512, 1, "MoE-Gen"),
    "gsm8k": Published(512, 512, 256, "MoE-Gen"),
    "chatbot_arena": Published(256, 256, 512, "MoE-Gen"),
    "longbench": Published(4096, 4096, 2048, "MoE-Gen"),
    "sharegpt": Published(512, 512, 64, "PreScope"),
    "dpo": Published(128, 128, 32, "PreScope"),
    "llava": Published(128, 128, 32, "PreScope"),
}

# One row as each dataset publishes it, and the prompt it must become.
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "mtbench_lightning": ({"question_id": 81, "turns": ["Write.", "Rewrite."]}, "Write."),
    "mtbench": (
        {"question_id": 81, "turns": ["Write.", "Rewrite."]},
        "You are a helpful assistant. Answer the user's question.\n\nQuestion: Write.\n\nAnswer:",
    ),
    "rag12000": ({"context": "C", "question": "Q", "answer": "A"}, "Context: C\n\nQuestion: Q\n\nAnswer:"),
    "aime2024": ({"ID": "I-1", "Problem": "Find x.", "Solution": "s", "Answer": 4}, "Find x."),
    "synthetic_reasoning": ({"prompt": "ready"}, "ready"),
    "mmlu": (
        {"question": "Q", "subject": "s", "choices": ["1", "2", "3", "4"], "answer": 0},
        "Q\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:",
    ),
    "gsm8k": ({"question": "Q", "answer": "#### 1"}, "Question: Q\nAnswer:"),
    "chatbot_arena": ({"conversation_a": [{"role": "user", "content": "Q"}]}, "Q"),
    "longbench": ({"input": "Summarise.", "context": "C", "answers": []}, "C\n\nSummarise."),
    "sharegpt": ({"id": "x", "conversations": [{"from": "human", "value": "Q"}]}, "Q"),
    "dpo": ({"chosen": [{"role": "user", "content": "Q"}], "rejected": []}, "Q"),
    "llava": ({"image": "1.jpg", "conversations": [{"from": "human", "value": "Q\n<image>"}]}, "Q"),
}


def composed(name: str, *overrides: str) -> DatasetConfig:
    with initialize_config_dir(version_base=None, config_dir=str(FOLDER)):
        values = compose(config_name=None, overrides=[f"+dataset={name}", *overrides]).dataset
    container: Any = OmegaConf.to_container(values, resolve=True)
    return parse(DatasetConfig, container, "dataset")


def build(config: DatasetConfig, tokenizer: Any) -> Workload:
    return build_workload(config, tokenizer, vocab_size=2048, max_positions=32768, seed=0)


def test_every_file_is_covered() -> None:
    assert set(NAMES) == set(PUBLISHED) == set(ROWS) | {"summarization"}


@pytest.mark.parametrize("name", NAMES)
def test_composes_with_the_published_figures(name: str) -> None:
    config, published = composed(name), PUBLISHED[name]
    assert config.name == name
    assert (config.lengths.mean, config.lengths.max) == (published.mean, published.max)
    assert config.max_new_tokens == published.max_new_tokens
    assert config.lengths.source.startswith(published.paper + ",")
    assert not config.use_hub and config.path is None


@pytest.mark.parametrize("name", NAMES)
def test_builds_offline_and_says_that_it_is_synthetic(name: str, tokenizer: Any) -> None:
    config = composed(name, "dataset.num_requests=40")
    workload = build(config, tokenizer)
    assert workload.is_synthetic and workload.source.startswith("synthetic: ")
    assert len(workload.requests) == 40 and workload.name == name
    if config.synthetic == "lengths":
        assert workload.mean_prompt_tokens == pytest.approx(PUBLISHED[name].mean, rel=0.15)  # 40 requests only
        assert workload.max_prompt_tokens <= PUBLISHED[name].max
        assert PUBLISHED[name].paper in workload.source


@pytest.mark.parametrize("name", ["mtbench", "mtbench_lightning", "rag12000", "aime2024", "summarization"])
def test_enough_requests_have_the_published_mean(name: str, tokenizer: Any) -> None:
    workload = build(composed(name, "dataset.num_requests=640"), tokenizer)
    assert workload.mean_prompt_tokens == pytest.approx(PUBLISHED[name].mean, rel=0.02)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_recipe_reads_the_published_layout(name: str, tokenizer: Any, tmp_path: Path) -> None:
    row, prompt = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    config = composed(name, f"dataset.path={path}", "dataset.num_requests=1")
    request = build(config, tokenizer).requests[0]
    assert (request.text, list(request.prompt_ids)) == (prompt, tokenizer(prompt)["input_ids"]), (
        "neither padded nor cut"
    )


def test_prompts_are_padded_where_the_command_line_asks_for_it(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS["gsm8k"][0]), encoding="utf-8")
    one = [f"dataset.path={path}", "dataset.num_requests=1"]
    workload = build(composed("gsm8k", *one, "dataset.min_prompt_tokens=512"), tokenizer)
    assert len(workload.requests[0].prompt_ids) == 512
    assert workload.source.endswith("; 1 prompt repeated up to 512 tokens")


def test_a_file_of_ones_own_needs_its_path_only(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Write."}), encoding="utf-8")
    workload = build(composed("file", f"dataset.path={path}"), tokenizer)
    assert {request.text for request in workload.requests} == {"Write."} and len(workload.requests) == 16
    with pytest.raises(ConfigError, match="dataset.path: must name a .jsonl"):
        composed("file", "dataset.path=null")


def test_summarization_puts_examples_in_front(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"document": f"d{number}", "summary": f"s{number}"} for number in range(7)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    workload = build(composed("summarization", f"dataset.path={path}", "dataset.num_requests=2"), tokenizer)
    shots = "".join(f"Article: d{number}\nOne-sentence summary: s{number}\n\n" for number in range(5))
    expected = [f"{shots}Article: d{number}\nOne-sentence summary:" for number in (5, 6)]
    assert [request.text for request in workload.requests] == expected


def test_one_override_sets_a_fixed_length(tokenizer: Any) -> None:
    workload = build(composed("longbench", "dataset.max_prompt_tokens=300", "dataset.num_requests=2"), tokenizer)
    assert {len(request.prompt_ids) for request in workload.requests} == {300}


def test_wrapping_moves_the_mean_as_between_the_papers(tokenizer: Any, shared_data: Path) -> None:
    """98 against 77 tokens for the same 80 turns: 21, with another tokenizer about as many."""
    path = f"dataset.path={shared_data / 'mt_bench_questions.jsonl'}"
    wrapped, bare = (
        build(composed(name, path, "dataset.num_requests=80"), tokenizer) for name in ("mtbench", "mtbench_lightning")
    )
    added = [
        len(long.prompt_ids) - len(short.prompt_ids)
        for long, short in zip(wrapped.requests, bare.requests, strict=True)
    ]
    assert max(added) - min(added) <= 2  # the wrapping is the same for every prompt
    assert 15 <= wrapped.mean_prompt_tokens - bare.mean_prompt_tokens <= 45
