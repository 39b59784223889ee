"""MoE-Lightning's Table 5 as configurations: the published policies, and the order of their throughputs."""

from __future__ import annotations

from harness.plan.planning import draft_plan
from tests.composing import composed

PUBLISHED = {  # experiment: mu, N, tok/s
    "table5_flexgen_own": (8, 1112, 9.5),
    "table5_flexgen_our_policy": (36, 504, 16.816),
    "table5_flexgen_larger_n": (36, 1116, 20.654),
    "table5_moelightning": (36, 504, 30.12),
}


def test_the_cross_of_table_5_plans_with_the_published_policies_and_predicts_their_order():
    predicted = []
    for name, (micro_batch_size, batch_size, _) in PUBLISHED.items():
        plan = draft_plan(composed(f"experiment={name}"))
        found = plan.strategy.plan
        assert (found["micro_batch_size"], found["batch_size"]) == (micro_batch_size, batch_size)
        assert plan.strategy.prediction is not None
        predicted.append(plan.strategy.prediction.throughput_tok_s)
    assert predicted == sorted(predicted)
    assert [tok_s for *_, tok_s in PUBLISHED.values()] == sorted(tok_s for *_, tok_s in PUBLISHED.values())
