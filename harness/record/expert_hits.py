"""Tell in words where a run's active experts ran, as systems count them that place single experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WAYS = ("resident", "prefetched", "cached", "on_demand", "cpu")  # entries of the counts, in the order of being told
_WORDS = {"on_demand": "on demand", "cpu": "on the CPU"}


def told_experts(counted: Mapping[str, Any] | None) -> str | None:
    """Return where active experts ran, and what became of prefetches; None where no experts were counted.

    An expert is active each time that a layer's router chooses it for any token of a pass.
    """
    if not counted or not counted.get("active"):
        return None
    ways = ", ".join(f"{counted[way]:,} {_WORDS.get(way, way)}" for way in _WAYS if counted.get(way))
    text = f"{counted['hit_rate']:.1%} of {counted['active']:,} active ones were on the device: {ways}"
    if not counted.get("issued"):
        return text
    wasted_mb = counted["wasted_bytes"] / 1e6
    withdrawn = f", {counted['withdrawn']:,} of them withdrawn in time" if counted["withdrawn"] else ""
    return f"{text}; {counted['issued']:,} prefetches{withdrawn}, {counted['wasted']:,} in vain ({wasted_mb:,.3g} MB)"
