"""Rows of requests.jsonl, for requests in every state."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

from harness.engine.sequences import Sequence, State
from harness.memory.tiers import Tier
from harness.record.passes import PassRecord
from harness.run import report
from harness.run.report import RunState, request_row
from harness.run.session import Session
from harness.workload.request import Request
from tests.composing import composed


@cache
def begun() -> Session:
    return Session.of(composed("machine=shuffled"))


def session_of(**known) -> Session:
    """A set-up that came as far as what is `known`."""
    return replace(begun(), **known)


def row(*, prompt=(5, 6), text="ab", tokenizer=True, clock="host", state=State.FINISHED, passes=True):
    sequence = Sequence(Request(request_id=3, prompt_ids=prompt, max_new_tokens=3, text=text), state=state)
    sequence.generated, sequence.token_times_s = [7, 8], [12.0, 15.5]
    decode = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"<{ids}>") if tokenizer else None
    run = RunState(session_of(machine=SimpleNamespace(clock=clock), model=SimpleNamespace(tokenizer=decode)))
    run.passes = [PassRecord(index=0, start_s=10.0, end_s=12.0)] if passes else []
    return request_row(sequence, run)


def test_a_finished_request_with_text():
    found = row()
    assert (found["prompt_text"], found["prompt_ids"], found["generated_text"]) == ("ab", [5, 6], "<[7, 8]>")
    assert (found["first_token_s"], found["finished_s"]) == (2.0, 5.5)


def test_every_field_has_its_own_value():
    sequence = Sequence(Request(request_id=3, prompt_ids=(5, 6, 9), max_new_tokens=7, text="abc"), state=State.REJECTED)
    sequence.generated, sequence.num_preemptions, sequence.finished_pass = [7, 8], 4, 11
    sequence.reject_reason, sequence.num_cached, sequence.padding = "too long", 12, 13
    found = request_row(sequence, RunState(session_of()))
    told = ("request_id", "state", "reject_reason", "prompt_tokens", "generated_ids", "preemptions", "finished_pass")
    assert [found[name] for name in told] == [3, "rejected", "too long", 3, [7, 8], 4, 11]


def test_what_nobody_knows_is_none():
    assert row(state=State.DECODING)["first_token_s"] == 2.0 and row(state=State.DECODING)["finished_s"] is None
    for unknown in (row(clock="none"), row(passes=False)):
        assert unknown["first_token_s"] is None and unknown["finished_s"] is None
    plain = row(text=None, tokenizer=False)  # ids that never were text
    assert (plain["prompt_text"], plain["prompt_ids"], plain["generated_text"]) == (None, None, None)


def test_a_long_prompt_is_cut_and_says_so():
    found = row(prompt=(5,) * 30_000, text="x" * 60_000)
    assert found["prompt_ids"] is None and found["prompt_tokens"] == 30_000
    assert found["prompt_text"].startswith("xxx") and found["prompt_text"].endswith("... (60,000 characters in all)")
    assert len(found["prompt_text"]) < 5000


def test_memory_is_told_at_its_peak():
    tier = Tier("device", 100)
    tier.release(tier.reserve("for a while", 70))
    tier.reserve("to the end", 40)
    machine = SimpleNamespace(
        tiers={"device": tier}, label="x", clock="host", facts={}, estimated_shares=None, link_ceilings_gb_s={}
    )
    facts = report._facts(RunState(session_of(machine=machine)), "ok", None)
    assert (facts.peak_bytes, facts.capacity_bytes) == ({"device": 70}, {"device": 100})
    assert facts.memory_holders == {"device": {"to the end": 40}}
