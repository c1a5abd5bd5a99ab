"""What a turn's going elsewhere costs, and what it saves."""

from __future__ import annotations

import pytest
from simulate_build import BLOCK, a_row, a_trace

from benchmarks.policies._moves import Moves, Watched
from kvfleet.placement.policies import Choice, Policy, Question, build_policies
from kvfleet.placement.policies.cost import Cost
from kvfleet.placement.simulate.fleet_shape import FleetShape
from kvfleet.placement.simulate.simulation import Simulation
from kvfleet.placement.simulate.trace import Trace


class Elsewhere(Cost):
    """Reckons, then takes the other worker each time."""

    def choose(self, question: Question) -> Choice | None:
        choice = super().choose(question)
        assert choice is not None
        turn = int(question.ask.request) % len(question.candidates)
        return Choice(question.candidates[turn].id, "", choice.prices)


def watched(policy: Policy, trace: Trace) -> Moves:
    watch = Watched(policy)
    shape = FleetShape(workers=2, cache_blocks=100)
    Simulation(trace, shape, "cost", lambda chance: build_policies(chance) | {"cost": watch}).run()
    return watch.moves


def turns(every_s: float) -> Trace:
    path = list("abcdefghij")
    return a_trace(
        *(a_row(number * every_s, path[: 4 + 2 * number], tokens=(4 + 2 * number) * BLOCK) for number in range(4))
    )


def test_turns_that_stay_are_no_moves() -> None:
    assert watched(Cost(), turns(1.0)) == Moves(turns=3)


def test_leaving_what_was_computed_for_nothing_is_dear() -> None:
    found = watched(Elsewhere(), turns(1.0))
    assert (found.turns, found.free, found.dear) == (3, 0, 3)
    assert found.shares() == {"moved_free": 0.0, "moved_paid": 0.0, "moved_dear": 1.0}


@pytest.mark.parametrize(
    ("again_s", "saved_s", "kind"), [(0.0, 0.0, "free"), (-1.0, -2.0, "free"), (1.0, 2.0, "paid"), (1.0, 0.5, "dear")]
)
def test_each_move_is_of_one_kind(again_s: float, saved_s: float, kind: str) -> None:
    moves = Moves(turns=1)
    moves.note(again_s, saved_s)
    assert moves.shares() == {f"moved_{one}": float(one == kind) for one in ("free", "paid", "dear")}


def test_without_turns_nothing_is_said() -> None:
    assert Moves().shares() == {}
