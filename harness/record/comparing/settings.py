"""Find the settings in which runs differ, and which of these differences say more than the names of what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from harness.record.comparing.folders import Value

# Runs that differ in nothing but these are repeats of each other. Where records go and what is shown changes no run.
OF_ONE_RUN = ("seed", "repeats", "results_dir", "progress", "exclusive", "wandb", "experiment")

Defaults = Callable[[str, str], Mapping[str, Value]]  # of a group's choice, by dotted name


def of_configuration(name: str) -> bool:
    """Tell whether the setting tells configurations apart, rather than repeats of one."""
    return name.partition(".")[0] not in OF_ONE_RUN


def differing(settings: pd.DataFrame) -> list[str]:
    """Return the columns that do not have one value; a setting that some rows lack differs."""
    return [name for name in settings if settings[name].nunique(dropna=False) > 1]


def worth_showing(settings: pd.DataFrame, default_of: Defaults) -> list[str]:
    """Return the differing columns without those that merely come with another choice in a group.

    Where rows differ in a group's name, a setting of the group is shown if it differs among rows of one name, or if a
    row has another value than its choice's default. Strategies are what is compared: what several of them have is
    shown wherever it differs.
    """
    return [name for name in differing(settings) if _says_something(name, settings, default_of)]


def _says_something(name: str, settings: pd.DataFrame, default_of: Defaults) -> bool:
    group, _, key = name.partition(".")
    choice = f"{group}.name"
    if choice not in settings or key == "name" or settings[choice].nunique(dropna=False) == 1:
        return True
    present = settings.loc[settings[name].notna(), [choice, name]]
    if present.groupby(choice)[name].nunique().gt(1).any():
        return True
    if any(default_of(group, chosen).get(name) != value for chosen, value in present.itertuples(index=False)):
        return True
    return group == "strategy" and key != "package" and present[name].nunique() > 1


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Name each setting by its last word, where that tells it from the others; a choice by its group."""
    last = {name: name.removesuffix(".name").rpartition(".")[2] for name in names}
    taken = list(last.values())
    return {name: short if taken.count(short) == 1 else name for name, short in last.items()}
