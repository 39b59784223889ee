"""Show a training on the terminal: one line with loss, tokens a second and progress; plain lines where nobody
watches."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class TrainingProgress:
    """A bar on a terminal, and a line for each test on held-out text."""

    def __init__(self, console: Console, *, shown: bool) -> None:
        self.console = console
        self._bar: Progress | None = None
        if shown and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task("training", total=1.0)

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self, row: Mapping[str, Any], progress: float) -> None:
        """Show a row of the records, and the share of the training that is done."""
        text = f"step {row['step']}: loss {row['loss']:.3f}, {row['tok_s']:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=progress, description=text)
        if "held_out" in row:
            losses = ", ".join(f"{name} {loss:.3f}" for name, loss in row["held_out"].items())
            busiest = max(layer["max_over_mean"] for layer in row["layers"].values())
            self.note(f"{text}; held out: {losses}; busiest expert {busiest:.1f} times the mean; {progress:.0%}")
