"""The process that talks to Weights & Biases: one JSON message a line in, one reply for `start` and one for `finish`.

Standard output carries the replies alone; whatever the client prints goes to standard error, which is a log file. When
the run dies, its end of the pipe closes, and the W&B run is ended as failed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import IO, Any


def main() -> int:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job: the run tells this one when it ends
    os.nice(10)  # a view of the run must not take a core from it
    run: Any = None
    rows = ""
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if message["what"] == "start":
                run, rows = _start(message), message["settings"]["rows"]
                _reply(replies, ok=os.path.basename(os.path.dirname(run.dir)))
            elif message["what"] == "pass":
                run.log(flat(message["row"], rows))
            else:
                _reply(replies, ok=_finish(run, message))
                return 0
    except BaseException as error:  # whatever it is, the run wants it in one line
        _reply(replies, error=f"{type(error).__name__}: {error}")
        raise
    signal.alarm(30)  # nobody waits any more: end for certain
    if run is not None:
        run.finish(exit_code=1)
    return 1


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to `a/b` keys, which W&B draws as one section; unknown values (None) are left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            result[f"{prefix}{key}"] = value
    return result


def _start(message: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise RuntimeError("not installed (pip install wandb, or wandb.mode=disabled)") from error
    chosen = message["settings"]
    run = wandb.init(
        mode=chosen["mode"],
        project=chosen["project"],
        entity=chosen["entity"],
        group=chosen["group"],
        job_type=chosen["job_type"],
        tags=chosen["tags"],
        name=chosen["name"],
        dir=chosen["dir"],
        config={**message["config"], "meta": message["meta"]},
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=chosen["timeout_s"],
            disable_git=True,  # meta.json has it
            disable_code=True,
            x_disable_stats=True,  # sampling would disturb the lanes
            x_disable_meta=True,  # folders of this computer; meta.json has what matters
        ),
    )
    # The summary is summary.json's: the last pass must not leave its values there.
    index = f"{chosen['rows']}index"
    run.define_metric(index, summary="none")
    run.define_metric(f"{chosen['rows']}*", step_metric=index, summary="none")
    return run


def _finish(run: Any, message: Mapping[str, Any]) -> str:
    import wandb

    if message["requests"]:
        columns = list(message["requests"][0])
        rows = [[row[name] for name in columns] for row in message["requests"]]
        run.log({"requests": wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})
    run.summary.update(flat(message["summary"]))
    if message["trace"]:
        artifact = wandb.Artifact(f"trace-{run.id}", type="trace")
        artifact.add_file(message["trace"], policy="immutable")  # uploaded from where it lies, not copied first
        run.log_artifact(artifact)
    url = run.url
    run.finish(exit_code=0 if message["summary"].get("status") == "ok" else 1)
    return url or ""


def _reply(replies: IO[str], **reply: str) -> None:
    replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    sys.exit(main())
