"""Write numbers into cells of tables: one that is missing leaves its cell empty."""

from __future__ import annotations


def number(value: float | None) -> str:
    """Write three digits, or all of a large number; nothing where there is none."""
    if value is None:
        return ""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def pair(first: float | None, second: float | None) -> str:
    return f"{number(first)} / {number(second)}" if first is not None or second is not None else ""
