"""The configuration as `run.py` gets it, without running anything."""

from __future__ import annotations

from harness.cli.overrides import CONF
from paper_figures.composing import GROUPS, composed

__all__ = ["CONF", "GROUPS", "composed", "names_in"]


def names_in(group: str) -> list[str]:
    """List what can be picked in a group; files that start with an underscore are shared parts."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))
