"""Places: whatever is taken, held, left and withdrawn, no place has two occupants and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine.base import H2D, TicketState
from harness.memory.occupancy import Places
from tests.unit.machine.ops import Quick
from tests.unit.memory.parts import machine

ACTIONS = ("take", "take any", "hold", "let go", "leave", "withdraw", "clear")


@settings(max_examples=150)
@given(
    poison=st.booleans(),
    eager=st.sampled_from((0.0, 0.5)),  # with 0.0 no transfer begins before something is waited for
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 4), st.integers(0, 2)), max_size=30),
)
def test_places_beside_a_model(poison, eager, steps):
    device = machine(poison=poison)
    device._eager = eager
    places = Places[int](device, "device")
    buffers = places.reserve("slots", {name: 64 * (name + 1) for name in range(3)})
    lies_in, holds = {}, dict.fromkeys(range(5), 0)
    for what, key, name in steps:
        match what:
            case "take" if key not in lies_in:
                if buffers[name] in lies_in.values():
                    with pytest.raises(AssertionError, match="was not released"):
                        places.take(key, buffers[name])
                else:
                    lies_in[key] = places.take(key, buffers[name])
                    places.bring(key, H2D, Quick())
            case "take any" if key not in lies_in and len(lies_in) < 3:
                given_ = places.take(key)
                assert given_ not in lies_in.values()
                lies_in[key] = given_
            case "hold" if key in lies_in:
                places.hold(key)
                holds[key] += 1
            case "let go" if holds[key]:
                places.let_go(key)
                holds[key] -= 1
            case "leave" if key in lies_in and not holds[key]:
                places.leave(key)
                del lies_in[key]
            case "withdraw" if key in lies_in:
                withdrawn = places.withdraw(key)
                assert not (withdrawn and holds[key])
                assert withdrawn or holds[key] or eager, "nothing has begun"
                if withdrawn:
                    del lies_in[key]
            case "clear":
                places.clear()
                lies_in, holds = {}, dict.fromkeys(range(5), 0)
        device.tiers["device"].check_integrity()
        assert {key: places[key] for key in range(5) if key in places} == lies_in
        assert set(places.idle()) == {key for key in lies_in if not holds[key]}
        assert places.num_free == 3 - len(lies_in)
    places.close()
    assert not device.tiers["device"].used_bytes
    device.tiers["device"].check_integrity()


@pytest.mark.parametrize("first_has_run", [False, True])
def test_an_occupant_of_several_transfers_leaves_with_all_others_only(first_has_run):
    """Withdrawn alone, it might lose the later transfers while the first one goes on."""
    device = machine()
    device._eager = 0.0
    places = Places[int](device, "device")
    places.reserve("slots", {0: 64})
    places.take(0)
    first = places.bring(0, H2D, Quick())
    second = places.bring(0, H2D, Quick(), after=[first])
    if first_has_run:
        device.wait(first)
    with pytest.raises(AssertionError, match="several transfers"):
        places.withdraw(0)
    assert not second.settled
    places.clear()
    assert second.state == TicketState.CANCELLED and (first.state == TicketState.CANCELLED) != first_has_run
    assert 0 not in places and places.num_free == 1
