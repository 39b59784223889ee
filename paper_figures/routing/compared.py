"""Write what small trained models show beside what papers publish of large ones, as a page of tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.study.predictability import HOT
from harness.study.tables import NAMES, table
from paper_figures.routing import drawn, published
from paper_figures.routing.drawn import Column, Study, over_domains


def page(columns: Sequence[Column]) -> str:
    parts = [
        "# Small trained models beside published large ones",
        "## Hot experts of a batch\n\nPreScope's Table 3 counts for its trained predictor (LLaPor): of 32 tokens, the "
        "m experts with most predicted tokens that are among the m + 2 with most tokens. Ours: by what is said, on "
        "requests that it did not learn from; mean over domains and layers but the first.",
        hot(columns),
        "By chance, m of n experts are among any m + 2 with probability (m + 2) / n: with 8 experts that is 50, 62 and "
        "75 %, with 64 it is 6, 8 and 9 %.",
        "## The top k of a token\n\n" + tokens(columns),
        f"Published: LLaPor names at least {published.LLAPOR_LEAST_HIT_RATE:.0%} of the top k in any layer of its four "
        f"models (PreScope Fig. 16), {published.LLAPOR_OVER_GATE[0]:.0%} to {published.LLAPOR_OVER_GATE[1]:.1%} better "
        f"than gate-based prediction; SiDA over {published.SIDA_HIT_RATE:.0%} on Switch-Base-128, as PreScope quotes.",
        "## By layer\n\nThe first, middle and last third of the layers. PreScope's Fig. 2 groups layers by the last "
        "numbers of each model (`groups.png`); a favourite's weight is known where runs recorded weights.",
        thirds(columns),
        table(["published", "of large models"], [list(row) for row in published.STATEMENTS]),
        "MoE-Lens, MoE-Lightning and MoE-Gen publish nothing on which experts are chosen; their models count every "
        "expert as used by every batch.",
        "PreScope's Fig. 5 is of what experts cost by their tokens, not of routing: `../prescope-simulated` has that.",
    ]
    return "\n\n".join(parts) + "\n"


def _studies(columns: Sequence[Column]) -> list[tuple[str, Study]]:
    found = [(column.title, column.study) for column in columns]
    return found + [(f"{c.title}, untrained", c.control) for c in columns if c.control is not None]


def hot(columns: Sequence[Column]) -> str:
    rows = [
        [
            f"{name} (LLaPor, PreScope Table 3)",
            *_form(*published.FORMS[name]),
            *(f"{v[m]:.0%}" for m in (*HOT, "tokens")),
        ]
        for name, v in published.TABLE3.items()
    ]
    for title, study in _studies(columns):
        for predictor in NAMES:
            if predictor in next(iter(study["prediction"].values())):
                keys = [*(f"hot_{m}" for m in HOT), f"hot_{HOT[-1]}_tokens"]
                shares = [over_domains(study, "prediction", predictor, key).mean() for key in keys]
                model = study["model"]
                rows.append([f"{title}: {NAMES[predictor]}", *_form(model["experts"], model["k"]),
                             *(f"{share:.0%}" for share in shares)])  # fmt: skip
    return table(["model and predictor", "experts", "k", *(f"Top{m}" for m in HOT), "tokens"], rows)


def _form(experts: int, k: int) -> tuple[str, str]:
    return str(experts), str(k)


def tokens(columns: Sequence[Column]) -> str:
    rows = []
    for title, study in _studies(columns):
        k, first = study["model"]["k"], next(iter(study["prediction"].values()))
        for predictor in NAMES:
            if predictor in first:
                named = over_domains(study, "prediction", predictor, "true_that_are_predicted")
                within = (
                    over_domains(study, "prediction", predictor, "within_true_top").mean()
                    if "within_true_top" in first[predictor]
                    else None
                )
                rows.append([
                    f"{title}: {NAMES[predictor]}", f"{named[:, k - 1].mean():.0%}",
                    f"{named[:, k - 1].min():.0%} to {named[:, k - 1].max():.0%}", f"{named[:, k + 1].mean():.0%}",
                    "-" if within is None else f"{within:.0%}",
                ])  # fmt: skip
    heads = [
        "model and predictor",
        "top k named by k",
        "by layer",
        "named by k + 2",
        "k predicted within the true k + 2",
    ]
    return table(heads, rows)


def thirds(columns: Sequence[Column]) -> str:
    rows = []
    for column in columns:
        study, k = column.study, column.study["model"]["k"]
        given = {"busiest expert / mean": over_domains(study, "popularity", "busiest_over_mean")[1:]}
        for predictor in NAMES:
            if predictor in next(iter(study["prediction"].values())):
                named = over_domains(study, "prediction", predictor, "true_that_are_predicted")[:, k - 1]
                given[f"named by {k}: {NAMES[predictor]}"] = named
        given["load of the hottest quarter of experts"] = drawn.hottest_quarter(study)
        given["bits of the favourite, of its entropy"] = drawn.informed(study)
        if (cosines := drawn.cosines(study)) is not None:
            given["cosine of gating inputs"] = cosines
        if (weights := drawn.favourite_weights(study)) is not None:
            given["favourite's share of a token's weights"] = weights
        for name, values in given.items():
            parts = (part.mean() for part in np.array_split(values, 3))
            rows.append([f"{column.title}: {name}", *(f"{part:.2f}" for part in parts)])
    return table(["", "first", "middle", "last"], rows)
