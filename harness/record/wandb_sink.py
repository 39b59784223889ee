"""One Weights & Biases run a run, in a process of its own: the files of the run folder are the truth, W&B a view.

W&B's client starts threads and a service, asks the network, and registers work for interpreter exit. All of that lives
in a child process (`wandb_child.py`) that can be killed, so that a client that is missing, full, broken or hangs costs
the run a warning and at most `timeout_s`, and disturbs its lanes as little as possible.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import harness
from harness.config import config, require
from harness.record.files import plain

_ONLINE_SHARE = 0.5  # of `timeout_s`: as a rule what is left is enough for the offline client of a run without network
_NO_EXPERIMENT = "none"  # what conf/experiment/none.yaml says
_MODES = ("offline", "online", "disabled")
_OLD_MODES = {"dryrun": "offline", "run": "online"}  # which WANDB_MODE may still say
_LONGEST_TAG = 64  # characters, as W&B has it
_QUIET = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "PYTHONUNBUFFERED": "1"}


@config
class WandbConfig:
    """`mode=online` needs an account (`wandb login` or WANDB_API_KEY); `mode=null` is WANDB_MODE, else offline;
    `group=null` groups by experiment, else by sweep."""

    mode: Literal["offline", "online", "disabled"] | None = None
    project: str = "moe-offload-harness"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    timeout_s: float = 30.0  # longest wait for the client at the start, and at the end

    @property
    def chosen_mode(self) -> str:
        said = os.environ.get("WANDB_MODE") or "offline"
        return self.mode or _OLD_MODES.get(said, said)

    def __post_init__(self) -> None:
        valid = f"the environment's WANDB_MODE must be one of {', '.join(_MODES)}, got '{self.chosen_mode}'"
        require(self.chosen_mode in _MODES, "mode", valid)
        require(bool(self.project.strip()), "project", "must be a name, got an empty text")
        require(self.timeout_s > 0, "timeout_s", f"must be a positive number of seconds, got {self.timeout_s}")


class WandbSink:
    """A sink takes `start`, `settle` before the first timed pass, `log_pass` as passes come, and `finish`. None of them
    raises or hangs.

    Where W&B cannot be reached, the run is recorded offline. After any other failure everything else is ignored;
    `warning` says in one line what went wrong in either case.
    """

    def __init__(self, config: WandbConfig, run_folder: Path, *, rows: str = "pass") -> None:
        """Put files under `run_folder`/wandb; the run is named after the folder. `rows` says what history is of."""
        self.warning: str | None = None
        self._config = config
        self._rows = rows
        self._mode = config.chosen_mode
        self._shown, self._folder = run_folder, run_folder.resolve()
        self._hello: dict[str, Any] = {}
        self._client_folder = ""  # below `run_folder`/wandb
        self._child: subprocess.Popen[bytes] | None = None
        self._settled = self._lost = False

    def start(self, config: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Launch the client without waiting for it. Of `meta`, `experiment` is the group unless one is configured; it
        is that of a `sweep` where that has a name."""
        if self._mode != "disabled":
            self._hello = {"settings": self._settings(config, meta), "config": plain(config), "meta": plain(meta)}
            self._begin()

    def settle(self) -> str | None:
        """Wait until the client has started, so that its start does not disturb timed passes, and return the warning,
        if any."""
        if self._active and not self._settled:
            self._settled = True
            reply = self._await("the start", self._starting_s)
            if "error" in reply and self._mode == "online":
                self._go_offline()
                reply = self._await("the start", self._starting_s) if self._active else reply
            self._client_folder = reply.get("ok", "")
        return self.warning

    def log_pass(self, row: Mapping[str, Any]) -> None:
        """Log one row of history, by `row["index"]`; it leaves nothing in the summary."""
        if self._active:
            self._send("pass", row=plain(row))

    def finish(
        self, summary: Mapping[str, Any], trace_path: Path | None = None, requests: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Hand over summary, trace and some rows of requests, and end the run. Returns in one line what became of it,
        for the run's own summary."""
        if self._mode == "disabled":
            return "disabled"
        self.settle()
        url = ""
        if self._active:
            trace = str(trace_path.resolve()) if trace_path else None
            self._send("finish", summary=plain(summary), trace=trace, requests=plain(requests))
            url = self._await("the end", self._config.timeout_s).get("ok", "")
            self._stop()
        sync = f"wandb sync {shlex.quote(str(self._shown / 'wandb' / self._client_folder))}"
        if self._child is None or self._lost:
            partly = f"; in part: {sync}" if self._client_folder and self._mode == "online" else ""
            return f"not recorded: {self.warning or 'never started'}{partly}"
        return f"online: {url}" if url else f"offline{f' ({self.warning})' if self.warning else ''}: {sync}"

    @property
    def _active(self) -> bool:
        return self._child is not None and not self._lost

    @property
    def _starting_s(self) -> float:
        """The seconds that the client may take to start."""
        return self._config.timeout_s * (_ONLINE_SHARE if self._mode == "online" else 1.0)

    def _settings(self, config: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
        chosen, experiment, sweep = self._config, meta.get("experiment"), meta.get("sweep")
        groups = (config.get(name) for name in ("strategy", "model", "dataset", "machine"))
        names = (str(group["name"]) for group in groups if isinstance(group, Mapping) and group.get("name"))
        return {
            "project": chosen.project,
            "entity": chosen.entity,
            "group": chosen.group or (experiment if experiment != _NO_EXPERIMENT else sweep and f"sweep {sweep}"),
            "job_type": "sweep" if sweep else "run",
            "rows": f"{self._rows}/",
            "tags": list(dict.fromkeys(tag[:_LONGEST_TAG] for tag in (*chosen.tags, *names))),
            "name": self._folder.name,
            "dir": str(self._folder),
        }

    def _begin(self) -> None:
        """Launch a client with queues of its own: nobody reads what another client may still say."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        try:
            (self._folder / "wandb").mkdir(exist_ok=True)
            self._launch()
        except OSError as error:
            self._give_up(f"cannot start the client: {error}")
            return
        chosen = {**self._hello["settings"], "mode": self._mode, "timeout_s": self._starting_s}
        self._send("start", **{**self._hello, "settings": chosen})

    def _go_offline(self) -> None:
        """Record the run for `wandb sync`, since W&B was not reached in time."""
        for stub in (self._folder / "wandb").glob("run-*"):
            shutil.rmtree(stub, ignore_errors=True)
        self._mode, self._lost = "offline", False
        self._begin()

    def _launch(self) -> None:
        root = str(Path(harness.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with (self._folder / "wandb" / "client.log").open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "harness.record.wandb_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **os.environ,
                    **_QUIET,
                    "WANDB_MODE": self._mode,
                    "WANDB_DATA_DIR": str(self._folder / "wandb"),
                    "PYTHONPATH": path,
                },
                start_new_session=True,  # Ctrl-C is for the run; and the group can be ended as a whole
            )
        for target, box in ((_write_outbox, self._outbox), (_read_replies, self._replies)):
            threading.Thread(
                target=target, args=(self._child, box), name=f"wandb-{target.__name__}", daemon=True
            ).start()

    def _send(self, what: str, **message: Any) -> None:
        self._outbox.put((json.dumps({"what": what, **message}) + "\n").encode())

    def _await(self, what: str, timeout_s: float) -> dict[str, Any]:
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            reply = {"error": f"no answer within {timeout_s:g} s at {what}"}
        if "error" in reply:
            self._give_up(str(reply["error"]))
        return reply

    def _give_up(self, reason: str) -> None:
        self.warning, self._lost = f"W&B: {' '.join(reason.split())[:300]}", True
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


def _write_outbox(child: subprocess.Popen[bytes], outbox: queue.SimpleQueue[bytes | None]) -> None:
    assert child.stdin is not None
    with suppress(OSError), child.stdin:  # a client that is gone shows in its missing reply
        while (line := outbox.get()) is not None:
            child.stdin.write(line)
            child.stdin.flush()


def _read_replies(child: subprocess.Popen[bytes], replies: queue.SimpleQueue[dict[str, Any]]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            replies.put(json.loads(line))
    replies.put({"error": "the client ended without an answer (see wandb/client.log in the run folder)"})
