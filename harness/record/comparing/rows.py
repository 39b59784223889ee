"""One row for each configuration: medians and extremes over its repeats, and ratios to a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from harness.config import ConfigError, require
from harness.record.comparing.folders import GROUPS, Finished
from harness.record.comparing.settings import Defaults, differing, of_configuration, short_names, worth_showing

RATE = "throughput_tok_s"
TIMES = ("ttft_s", "tpot_s", "e2e_s")
OLDEST = "row 1, the oldest"  # the baseline where none is asked for
PLANNING = "strategy.planning"  # of systems with a planner of their own; None of others, which are the same either way
_NUMBERS = (RATE, "predicted_tok_s", "prediction_accuracy")  # None where there are none


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison has a row for each configuration, numbered from 1. `settings` are all of them by dotted name,
    `measured` has medians over repeats; `shown` are the settings worth showing. `baseline` tells what ratios are to;
    None where there are none."""

    settings: pd.DataFrame
    measured: pd.DataFrame
    shown: Sequence[str]
    baseline: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """The short name of each setting that an export has."""
        return short_names(list(dict.fromkeys([*(f"{group}.name" for group in GROUPS), *self.shown])))

    @property
    def exported(self) -> pd.DataFrame:
        """Everything in one table: the names of what was chosen, settings that are shown, and what was measured."""
        named = self.settings[list(self.names)].rename(columns={f"{group}.name": group for group in GROUPS})
        return pd.concat([named, self.measured], axis="columns").rename_axis(index="row").reset_index()


def compared(runs: Sequence[Finished], default_of: Defaults) -> Comparison:
    """Join runs that differ in nothing but their seed, and in where their records go, to one row. Rows keep the
    order."""
    settings = pd.DataFrame([run.settings for run in runs]).infer_objects()
    settings = settings[[name for name in settings if of_configuration(name)]]
    measured = pd.DataFrame([_measured(run) for run in runs]).astype(dict.fromkeys(_NUMBERS, float))
    alike = pd.concat([settings[differing(settings)], measured[["label", "weights_source"]]], axis="columns")
    row = alike.groupby(list(alike), dropna=False, sort=False).ngroup() + 1
    settings = settings.groupby(row).head(1).set_axis(range(1, row.max() + 1))
    planning = settings[PLANNING] if PLANNING in settings else pd.Series(None, index=settings.index, dtype=object)
    return Comparison(
        settings=settings,
        measured=_over_repeats(measured, row).assign(planning=planning),
        shown=worth_showing(settings, default_of),
    )


def with_ratios(comparison: Comparison, asked: str | None) -> Comparison:
    """Add ratios of throughput to the rows that `asked` names, a run or settings with their values; else to the first
    row.

    A row's extremes are those of its worst repeat to its baseline's best, and the other way round. Where `asked` are
    settings, a row's baseline has them and agrees with the row in all others but the strategy's own; whether both are
    planned as built counts, though. Some rows may have none. Raises ConfigError.
    """
    rows = comparison.measured
    if len(rows) == 1 and asked is None:
        return comparison
    if asked is None:
        base_of, told = pd.Series(1, index=rows.index), OLDEST
    elif "=" in asked:
        base_of, told = _rows_with(asked, comparison), f"the row with {asked} that agrees in all else"
    else:
        base_of = pd.Series(_row_of_run(asked, comparison), index=rows.index)
        told = f"row {base_of.iloc[0]}, with run {asked}"
    base = rows.reindex(base_of).set_axis(rows.index)
    found = {
        f"ratio{suffix}": rows[f"{RATE}{suffix}"] / base[f"{RATE}{other}"].where(lambda rate: rate > 0)
        for suffix, other in (("", ""), ("_min", "_max"), ("_max", "_min"))
    }
    found |= {"ratio_to_row": base_of.astype("Int64"), "ratio_to_label": base["label"]}
    found["ratio_to_planning"] = base["planning"]
    return replace(comparison, measured=rows.assign(**found), baseline=told)


def in_order(comparison: Comparison, by: str, *, descending: bool) -> Comparison:
    """Sort rows by a column of the export, with rows without a value last. Raises ConfigError where there is no such
    column."""
    table = comparison.exported.set_index("row")
    told = {short: name.removesuffix(".name") for name, short in comparison.names.items()} | {"tok/s": RATE}
    full = told.get(by, by)
    require(full in table, "--sort", f"there is no column '{by}'; valid are {', '.join(table)}")
    order = table.sort_values(full, ascending=not descending, kind="stable", key=_comparable).index
    return replace(comparison, settings=comparison.settings.loc[order], measured=comparison.measured.loc[order])


def _measured(run: Finished) -> dict[str, Any]:
    summary = run.summary
    latency = asdict(summary.latency) if summary.latency else {}
    return {
        "label": summary.label,
        RATE: summary.throughput_tok_s,
        "predicted_tok_s": summary.predicted_throughput_tok_s,
        "prediction_accuracy": summary.prediction_accuracy,
        **{f"{time}_{name}": value for time in TIMES for name, value in (latency.get(time) or {}).items()},
        "busy.": 0.0,  # of a run without lanes
        **{f"busy.{lane}": share for lane, share in summary.utilization.items()},
        "num_verified": summary.verify.checked,
        "num_mismatched": summary.verify.mismatched,
        "disturbed": summary.disturbed,
        "data_source": summary.data_source,
        "weights_source": summary.weights_source,
        "run": run.run,
    }


def _over_repeats(measured: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    by = measured.groupby(row)
    times = [name for name in measured if name.startswith(TIMES)]
    lanes = by[[name for name in measured if name.startswith("busy.")]].median().fillna(0.0)
    rate = by[RATE]
    return pd.DataFrame(
        {
            "label": by["label"].first(),
            "num_runs": by.size(),
            "num_disturbed": by["disturbed"].count(),
            RATE: rate.median(),
            f"{RATE}_min": rate.min(),
            f"{RATE}_max": rate.max(),
            **by[[*_NUMBERS[1:], *times]].median(),
            "busiest_lane": lanes.idxmax(axis="columns").str.removeprefix("busy."),
            "busiest_share": lanes.max(axis="columns"),
            **by[["num_verified", "num_mismatched"]].sum(),
            **by[["data_source", "weights_source"]].first(),
            "disturbed": by["disturbed"].agg(lambda reasons: "; ".join(reasons.dropna().unique()) or None),
            "runs": by["run"].agg(list),
        }
    )


def _row_of_run(asked: str, comparison: Comparison) -> int:
    """Find the row of the one run whose name is `asked` or ends like it."""
    runs = comparison.measured["runs"].explode()
    found = runs[(runs == asked) | runs.str.endswith(f"-{asked}")]
    if len(found) != 1:
        named = f"{len(found)} runs are named so" if len(found) else "no run in the table is named so"
        raise ConfigError("--baseline", f"must be a run's name or NAME=VALUE, got '{asked}'; {named}")
    return int(found.index[0])


def _rows_with(asked: str, comparison: Comparison) -> pd.Series:
    """Find for each row the number of its baseline, missing where there is none."""
    settings = comparison.settings
    full = {short: name for name, short in comparison.names.items()}
    has = pd.Series(True, index=settings.index)
    wanted = []
    for pair in asked.split(","):
        short, _, value = pair.partition("=")
        name = full.get(short, short)
        require(name in settings, "--baseline", f"there is no setting '{short}'; rows differ in {', '.join(full)}")
        values = settings[name].map(str)
        valid = ", ".join(values[settings[name].notna()].unique())
        require((values == value).any(), "--baseline", f"no row has {short}={value}; valid are {valid}")
        has &= values == value
        wanted.append(name)
    others = [n for n in differing(settings) if n not in wanted and not n.startswith("strategy.")]
    agreeing = settings[others]
    if PLANNING not in wanted:
        agreeing = agreeing.assign(planning=_like(comparison.measured["planning"], has))
    same = agreeing.groupby(list(agreeing), dropna=False, sort=False).ngroup() if list(agreeing) else has * 0
    bases = same[has]
    twice = bases[bases.duplicated(keep=False)]
    if len(bases) == 0 or len(twice):
        told = f"rows {', '.join(map(str, twice.index))} all have it; add a setting" if len(twice) else "no row has it"
        raise ConfigError("--baseline", f"must name one row for each, got '{asked}'; {told}")
    return same.map(pd.Series(bases.index, index=bases))


def _like(planning: pd.Series, is_base: pd.Series) -> pd.Series:
    """Return what a row's baseline has to be planned like; the same for all rows where no baseline has a planner of its
    own. A row without one is like those that are planned best, or like all there are."""
    of_bases = set(planning[is_base].dropna())
    if not of_bases:
        return pd.Series("", index=planning.index)
    return planning.fillna("best" if "best" in of_bases else of_bases.pop())


def _comparable(column: pd.Series) -> pd.Series:
    """Make a column sortable: numbers by size; text, alone or among numbers, by its letters."""
    return column if pd.api.types.is_numeric_dtype(column) else column.map(str, na_action="ignore")
