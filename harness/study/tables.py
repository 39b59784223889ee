"""Write a study's numbers as JSON, and as a page of Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.study.predictability import BATCH, GATE, HOT

NAMES = {
    "popularity": "popularity",
    "previous_token": "the previous token's experts",
    "layer_before": "this layer's experts (co-activation)",
    "word": "the token's id",
    GATE: "the next layer's router on this layer's input",
}
CACHES = {"lru": "LRU", "lfu": "LFU", "hot_table": "table of hot experts", "belady": "Belady's optimum"}
DIGITS = 5
Numbers = Mapping[str, Any]


def write_rounded(path: Path, numbers: Any) -> dict[str, Any]:
    """Write numbers with few digits, lists of plain numbers on one line each, and return what was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_json(_rounded(numbers)) + "\n", encoding="utf-8")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(written, dict)
    return written


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _json(value: Any, indent: str = "") -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        items = (f"{inner}{json.dumps(key)}: {_json(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _json(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, separators=(",", ":") if isinstance(value, list) else None)


def markdown(n: Numbers) -> str:
    """Write the page of a study."""
    model, domains = n["model"], n["domains"]
    size = f"{model['layers']} layers with a router, {model['k']} of {model['experts']} experts a token"
    texts = "; ".join(
        f"{name}: {d['requests']} requests, {d['tokens']:,} tokens, {d['test_tokens']:,} of them to test"
        for name, d in domains.items()
    )
    sections = [
        f"# {n['title']}",
        f"`{model['model']}`: {size}. {texts}. "
        "Prompts only, read token by token. Every second request is learned from, the others test.",
        f"Made on {n['date']} by `{n['command']}`, code {n['code']}. Sources are in the JSON file beside this page.",
        "## Popularity\n\nMeans over layers; by chance an expert's share is "
        f"{1 / model['experts']:.1%}.\n\n{_popularity(n)}",
        _drift(n),
        "## From token to token and from layer to layer\n\n" + _correlation(n),
        "## Predicting the next layer's experts\n\n" + _prediction(n),
        "## Caches of experts\n\n" + _caches(n),
        "## Synthetic routing fitted to this\n\n" + _fit(n),
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _popularity(n: Numbers) -> str:
    def row(name: str) -> list[str]:
        p, k = n["popularity"][name], n["model"]["k"]
        busiest = np.array(p["busiest_over_mean"])
        entropy = np.mean(p["entropy_bits"])
        return [
            name, f"{entropy:.2f} of {p['most_entropy_bits']:.2f}", f"{busiest.mean():.2f}", f"{busiest.max():.2f}",
            _share(p["hot_quarter_share"]), f"{busiest.max() * k / n['model']['experts']:.0%}",
            str(sum(p["unused_experts"])),
        ]  # fmt: skip

    heads = (
        "domain", "entropy, bits", "busiest / mean", "worst layer", "load of the hottest quarter",
        "tokens that choose the busiest expert", "experts never chosen",
    )  # fmt: skip
    return table(heads, [row(name) for name in n["popularity"]])


def _drift(n: Numbers) -> str:
    d = n["drift"]
    told = (
        "Loads of the requests to learn from (row) beside those of the requests to test (column), means over layers: "
        "the share of the load that would have to move (total variation), and how many of the "
        f"{d['hot_experts']} hottest experts are the same ({d['hot_overlap_by_chance']:.0%} by chance). The diagonal "
        "is one domain with itself."
    )
    pairs = _matrix(d["domains"], d["total_variation"], d["hot_overlap"])
    return f"### Drift between domains\n\n{told}\n\n{pairs}"


def _correlation(n: Numbers) -> str:
    rows = []
    for name, tokens in n["tokens"].items():
        layers = n["layers"][name]
        kept = dict(zip(tokens["lags"], tokens["kept"], strict=True))
        info = layers["favourites"]
        net = np.mean(info["bits"]) - np.mean(info["shuffled_bits"])
        rows.append([
            name, _share(kept[1]), _share(tokens["independent"]), _share(kept[8]),
            _share(tokens["generated"]), _share(layers["followed"]), _share(layers["independent"]),
            f"{net:.2f} of {np.mean(info['entropy_bits']):.2f}",
        ])  # fmt: skip
    heads = (
        "domain", "experts kept from the token before", "if independent", "from 8 tokens before", "in generated text",
        "images of the layer before", "if independent", "bits of the favourite that the one before tells",
    )  # fmt: skip
    return table(heads, rows)


def _prediction(n: Numbers) -> str:
    k, first = n["model"]["k"], next(iter(n["prediction"].values()))
    ranks = range(1, k + 3)
    parts = [
        "Means over domains, and over all layers but the first. Top-m: the share of the first m predicted experts "
        f"that the router chooses. Named: the share of the {k} chosen experts that are among the first {k} and {k + 2} "
        "predicted.",
        table(
            ["predictor", *(f"top-{m}" for m in ranks), f"named by {k}", f"by {k + 2}", "worst layer", "best"],
            [_predictor_row(n, name) for name in NAMES if name in first],
        ),
        f"Hot experts of a batch, as PreScope's Table 3 counts: of {BATCH} tokens at random, the m experts for which "
        "most tokens are predicted, and the share of them that is among the m + 2 with most tokens; then the tokens of "
        f"the predicted {HOT[-1]} over those of the true {HOT[-1]}. Last, the share of each token's {k} predicted "
        f"experts that its router ranks among the first {k + 2}.",
        table(
            ["predictor", *(f"Top{m} in Top{m + 2}" for m in HOT), f"tokens of Top{HOT[-1]}", f"{k} in true {k + 2}"],
            [_hot_row(n, name) for name in NAMES if name in first],
        ),
    ]
    across = n["prediction_across"]
    for name in NAMES:
        if name in across:
            parts += [f"Named by {k}, by {NAMES[name]}: learned from (row), tested on (column).",
                      _matrix(across["domains"], across[name])]  # fmt: skip
    gate = [p[GATE] for p in n["prediction"].values() if GATE in p]
    if gate:
        cosine, again = np.mean([g["cosine"] for g in gate], axis=0), np.mean([g["recorded_again"] for g in gate])
        parts.append(
            f"Gating inputs of successive layers have a cosine of {cosine.mean():.2f} ({cosine.min():.2f} to "
            f"{cosine.max():.2f}). Routers give {again:.1%} of the recorded experts again for their recorded inputs."
        )
        if all("named_ahead" in g for g in gate):  # studies of before have none
            named = {d: np.mean([np.mean(g["named_ahead"][d]) for g in gate]) for d in gate[0]["named_ahead"]}
            told = ", ".join(f"{share:.1%} from {d}" for d, share in named.items())
            parts.append(f"Of its {k} experts a layer's router names, from the input of so many layers before: {told}.")
    return "\n\n".join(parts)


def _over_domains(n: Numbers, predictor: str, key: str) -> np.ndarray | None:
    """Return the mean over domains of something that has a value for each layer; None where it is unknown."""
    found = [p[predictor][key] for p in n["prediction"].values() if key in p.get(predictor, {})]
    return np.mean(found, axis=0) if found else None


def _predictor_row(n: Numbers, name: str) -> list[str]:
    k = n["model"]["k"]
    right, named = (_over_domains(n, name, key) for key in ("predicted_that_are_true", "true_that_are_predicted"))
    assert right is not None and named is not None
    by_layer = named[:, k - 1]
    shares = [*right.mean(axis=0), named[:, k - 1].mean(), named[:, k + 1].mean(), by_layer.min(), by_layer.max()]
    return [NAMES[name], *(f"{share:.0%}" for share in shares)]


def _hot_row(n: Numbers, name: str) -> list[str]:
    keys = [*(f"hot_{m}" for m in HOT), f"hot_{HOT[-1]}_tokens", "within_true_top"]
    return [NAMES[name], *(_share(_over_domains(n, name, key)) for key in keys)]


def _caches(n: Numbers) -> str:
    parts = [
        "Share of accesses that find their expert in the cache, which holds that share of all experts of all layers "
        "and was warmed up with the domain's other requests; means over domains. The optimum knows the future."
    ]
    keys = sorted({(row["requests"], row["size"]) for rows in n["caches"].values() for row in rows})
    rows = []
    for requests, size in keys:
        same = [r for of in n["caches"].values() for r in of if (r["requests"], r["size"]) == (requests, size)]
        rows.append([str(requests), f"{size:.1%}", *(_share([r[name] for r in same]) for name in CACHES)])
    parts.append(table(["requests at a time", "size", *CACHES.values()], rows))
    across = n["caches_across"]
    for name in CACHES:
        if name in across:
            parts += [f"One request at a time, {across['size']:.0%} of the experts, {CACHES[name]}: warmed up with or "
                      "made from (row), tested on (column).", _matrix(across["domains"], across[name])]  # fmt: skip
    return "\n\n".join(parts)


def _fit(n: Numbers) -> str:
    fit = n["fit"]
    settings = ", ".join(f"`{name}: {value:g}`" for name, value in fit["settings"].items())
    rows = []
    for name, found in fit["routings"].items():
        caches = (f"{_share(row['lru'])} / {_share(row['belady'])}" for row in found["caches"])
        rows.append([
            name, f"{found['entropy_bits']:.2f}", f"{found['busiest_over_mean']:.2f}", _share(found["kept"]),
            _share(found["followed"]), *caches,
        ])  # fmt: skip
    sizes = [f"LRU / optimum at {row['size']:.1%}" for row in fit["routings"]["recorded"]["caches"]]
    told = f"To all domains together: {settings}. What they give, drawn for as many tokens, beside the recorded:"
    return f"{told}\n\n" + table(
        ["routing", "entropy, bits", "busiest / mean", "kept", "images of the layer before", *sizes],
        rows,
    )


def _matrix(names: Sequence[str], *values: Sequence[Sequence[float]]) -> str:
    """Write square tables of shares, several in the same cells."""
    rows = []
    for at, name in enumerate(names):
        rows.append([name, *(" / ".join(f"{v[at][to]:.0%}" for v in values) for to in range(len(names)))])
    return table(["", *names], rows)


def _share(values: Any) -> str:
    """Write the mean of shares in percent; a dash where there are none."""
    return "-" if values is None or np.size(values) == 0 else f"{np.mean(values):.0%}"


def table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table: the first column is text, the others are numbers."""
    heads = list(heads)
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
