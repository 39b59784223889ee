"""One Weights & Biases run a run, in a process of its own: the files of the run folder are the truth, W&B a view.

W&B's client starts threads and a service, asks the network, and registers work for interpreter exit. All of that lives
in a child process (`wandb_child.py`) that can be killed, so that a client that is missing, full, broken or hangs costs
the run a warning and at most `timeout_s`, and disturbs its lanes as little as possible.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import harness
from harness.config import config, require
from harness.record.files import plain

_QUIET = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "PYTHONUNBUFFERED": "1"}


@config
class WandbConfig:
    """`mode=online` needs an account (`wandb login` or WANDB_API_KEY); `group=null` groups by experiment."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = "moe-offload-harness"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    timeout_s: float = 30.0  # longest wait for the client at the start, and at the end

    def __post_init__(self) -> None:
        require(bool(self.project.strip()), "project", "must be a name, got an empty text")
        require(self.timeout_s > 0, "timeout_s", f"must be a positive number of seconds, got {self.timeout_s}")


class WandbSink:
    """`start`, `settle` before the first timed pass, `log_pass` as they come, `finish`. None of them raises or hangs.

    After the first failure everything else is ignored, and `warning` says in one line what went wrong.
    """

    def __init__(self, config: WandbConfig, run_folder: Path) -> None:
        """Files go under `run_folder`/wandb; the run is named after the folder."""
        self.warning: str | None = None
        self._config = config
        self._folder = run_folder.resolve()
        self._child: subprocess.Popen[bytes] | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._settled = False

    def start(self, config: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Launch the client without waiting for it. An `experiment` in `meta` is the group unless one is configured."""
        if self._config.mode == "disabled":
            return
        try:
            (self._folder / "wandb").mkdir(exist_ok=True)
            self._launch()
        except OSError as error:
            self._give_up(f"cannot start the client: {error}")
            return
        self._send("start", settings=self._settings(meta), config=plain(config), meta=plain(meta))

    def settle(self) -> str | None:
        """Wait until the client has started, so that its start does not disturb timed passes. The warning, if any."""
        if self._active and not self._settled:
            self._settled = True
            self._await("the start")
        return self.warning

    def log_pass(self, row: Mapping[str, Any]) -> None:
        """One row of history; `row["index"]` is its step."""
        if self._active:
            self._send("pass", row=plain(row))

    def finish(self, summary: Mapping[str, Any], trace_path: Path | None = None) -> str:
        """Hand over summary and trace and end the run. What became of it, in one line, for the run's own summary."""
        if self._config.mode == "disabled":
            return "disabled"
        if self._active:
            self.settle()
        if self._active:
            self._send("finish", summary=plain(summary), trace=str(trace_path.resolve()) if trace_path else None)
            text = self._await("the end").get("ok", "")
            self._stop()
        return (
            f"not recorded: {self.warning}" if self.warning else text if self._child else "not recorded: never started"
        )

    @property
    def _active(self) -> bool:
        return self._child is not None and self.warning is None

    def _settings(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        chosen = self._config
        return {
            "mode": chosen.mode,
            "project": chosen.project,
            "entity": chosen.entity,
            "group": chosen.group or meta.get("experiment"),
            "tags": list(chosen.tags),
            "name": self._folder.name,
            "dir": str(self._folder),
            "timeout_s": chosen.timeout_s,
        }

    def _launch(self) -> None:
        root = str(Path(harness.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with (self._folder / "wandb" / "client.log").open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "harness.record.wandb_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_QUIET, "WANDB_DATA_DIR": str(self._folder / "wandb"), "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the run; and the group can be ended as a whole
            )
        for target in (self._write_outbox, self._read_replies):
            threading.Thread(target=target, args=(self._child,), name=f"wandb-{target.__name__}", daemon=True).start()

    def _send(self, what: str, **message: Any) -> None:
        self._outbox.put((json.dumps({"what": what, **message}) + "\n").encode())

    def _write_outbox(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        with suppress(OSError), child.stdin:  # a client that is gone shows in its missing reply
            while (line := self._outbox.get()) is not None:
                child.stdin.write(line)
                child.stdin.flush()

    def _read_replies(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                self._replies.put(json.loads(line))
        self._replies.put({"error": "the client ended without an answer (see wandb/client.log in the run folder)"})

    def _await(self, what: str) -> dict[str, Any]:
        try:
            reply = self._replies.get(timeout=self._config.timeout_s)
        except queue.Empty:
            reply = {"error": f"no answer within {self._config.timeout_s:g} s at {what}"}
        if "error" in reply:
            self._give_up(str(reply["error"]))
        return reply

    def _give_up(self, reason: str) -> None:
        self.warning = f"W&B: {' '.join(reason.split())[:300]}"
        self._stop(grace_s=0.0)

    def _stop(self, grace_s: float = 5.0) -> None:
        if self._child is None:
            return
        self._outbox.put(None)
        deadline_s = time.monotonic() + grace_s
        while self._child.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        with suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
