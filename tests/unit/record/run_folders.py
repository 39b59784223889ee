"""Run folders as a run leaves them, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recorded import facts, link_bound_run

from harness.record.store import RunFolder
from harness.record.summary import build_summary

META = {"code_version": "0123abcd", "environment": {"processor": "some processor"}}
PASSES = link_bound_run()


def configuration(strategy: str = "moelens", **settings: Any) -> dict[str, Any]:
    """Make a configuration: `group__key=value` sets a key of a group; `group=NAME` chooses another one of a name."""
    config: dict[str, Any] = {group: {"name": name} for group, name in CHOSEN.items()}
    config |= {"strategy": {"name": strategy, "packet_mb": 1.0}, "seed": 0, "kv_cache_gb": 0.04, "results_dir": "x"}
    for name, value in settings.items():
        group, _, key = name.partition("__")
        if key:
            config[group] = {**config[group], key: value}
        else:
            config[group] = {"name": value} if group in config and isinstance(config[group], dict) else value
    return config


CHOSEN = {"model": "mixtral-mini", "dataset": "mtbench", "machine": "emulated", "hardware": "laptop"}


def store(
    results: Path,
    tok_s: float | None,
    config: dict[str, Any] | None = None,
    *,
    status: str = "ok",
    error: str | None = None,
    meta: dict[str, Any] = META,
    **changes: Any,
) -> Path:
    """Store the folder of a run of that throughput; `changes` are those of its summary."""
    config = config or configuration()
    spans, passes = PASSES
    with RunFolder.create(results, f"{config['strategy']['name']}-aaaa", config, meta) as folder:
        if status == "ok":
            summary = build_summary(facts(strategy=config["strategy"]["name"]), passes, spans)
            folder.write_summary({**summary, "throughput_tok_s": tok_s, **changes})
        folder.finish(status, error)
    return folder.path
