"""Put the whole study of one model's recorded routing together, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from harness.study import caching, predictability
from harness.study.caches import steps_of
from harness.study.correlation import favourites_information, followed_shares, kept_share, kept_shares
from harness.study.fits import fit, likeness, synthetic
from harness.study.gates import Gates
from harness.study.loads import drift, popularity
from harness.study.recorded import Domain, Text, joined

FITTED_SIZES = (1 / 4, 3 / 8, 1 / 2)  # of caches in which fitted routing is compared with the recorded one
Log = Callable[[str], None]


def studied(
    domains: Mapping[str, Domain], gates: Mapping[str, Gates], *, most_passes: int, log: Log = lambda text: None
) -> dict[str, Any]:
    """Put a study of domains together that were recorded from one model.

    `gates` has what its routers say, where that is known."""
    header = next(iter(domains.values())).header
    found: dict[str, Any] = {
        "model": {name: getattr(header, name) for name in ("model", "layers", "first_layer", "experts", "k")},
        "domains": {name: _described(domain) for name, domain in domains.items()},
    }
    log("popularity and correlation")
    found["popularity"] = {name: popularity(domain.text) for name, domain in domains.items()}
    found["drift"] = drift(domains)
    found["tokens"] = {name: _tokens(domain) for name, domain in domains.items()}
    found["layers"] = {name: _layers(domain) for name, domain in domains.items()}
    predictors = predictability.usable(domains)
    for name, domain in domains.items():
        log(f"predictors, {name}")
        found.setdefault("prediction", {})[name] = predictability.within(domain, predictors, gates.get(name))
    found["prediction_across"] = predictability.across(domains, predictors)
    for name, domain in domains.items():
        log(f"caches, {name}")
        found.setdefault("caches", {})[name] = caching.by_size(domain, most_passes)
    log("caches across domains")
    found["caches_across"] = caching.across(domains, most_passes)
    log("fits")
    found["fit"] = _fitted(domains, most_passes)
    return found


def _described(domain: Domain) -> dict[str, Any]:
    return {
        "source": domain.header.source,
        "requests": len(domain.request_ids),
        "tokens": domain.text.num_tokens,
        "generated_tokens": domain.whole.num_tokens - domain.text.num_tokens,
        "test_tokens": domain.test.num_tokens,
        "favourite_weight": domain.favourite_weight,
    }


def _tokens(domain: Domain) -> dict[str, Any]:
    """Return how many experts tokens share with earlier ones, and apart how many in what was generated."""
    generated = None if domain.is_prompt is None else kept_share(domain.whole, 1, ~domain.is_prompt)
    return {**kept_shares(domain.text), "generated": generated}


def _layers(domain: Domain) -> dict[str, Any]:
    return {
        **followed_shares(domain.train, domain.test),
        "favourites": favourites_information(domain.text),
    }


def _fitted(domains: Mapping[str, Domain], most_passes: int) -> dict[str, Any]:
    """Fit synthetic routing to all domains together, and describe it beside what was recorded."""
    train, test = joined(d.train for d in domains.values()), joined(d.test for d in domains.values())
    settings = fit(train, test)
    skewed = {"name": "skewed", "zipf_exponent": settings["zipf_exponent"]}
    routings = {
        "recorded": (train, test),
        "correlated": _drawn({"name": "correlated", **settings}, train, test),
        "skewed": _drawn(skewed, train, test),
        "uniform": _drawn({"name": "uniform"}, train, test),
    }
    found = {}
    for name, (one, other) in routings.items():
        warm_up, steps = (steps_of(text, 1, most_passes) for text in (one, other))
        rates = [
            {"size": size, **caching.rates_of(steps, caching.places(other, size), warm_up, one)}
            for size in FITTED_SIZES
        ]
        found[name] = {**likeness(one, other), "caches": rates}
    return {"settings": settings, "routings": found}


def _drawn(values: Mapping[str, Any], train: Text, test: Text) -> tuple[Text, Text]:
    """Draw requests to learn from and requests to test by one synthetic routing."""
    both = synthetic(joined([train, test]), values, seed=0)
    count, in_train = len(both.starts) - 1, len(train.starts) - 1
    return both.requests(np.arange(in_train)), both.requests(np.arange(in_train, count))
