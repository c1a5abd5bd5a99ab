"""Schedules: the same from the same seed, whom each fault may hit, and that every kind has its turn."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.cases import Wanted, catalogue
from tests.chaos.history import Transport
from tests.chaos.layout import FAKE, REAL, Layout, Role
from tests.chaos.schedule import TRAITS, Kind, Schedule, kinds_in

LAYOUT = Layout.of()
VLLM = Layout.of_vllm()
WANTED = Wanted(real=14, fake=30)


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 250),
    duration=st.floats(1, 3600),
    layout=st.sampled_from((LAYOUT, VLLM)),
)
def test_any_schedule(seed: int, count: int, duration: float, layout: Layout) -> None:
    schedule = Schedule.of(seed, duration, count, layout)
    assert schedule == Schedule.of(seed, duration, count, layout)
    assert len(schedule.faults) == count
    times = [fault.at_s for fault in schedule.faults]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= duration
    for fault in schedule.faults:
        trait = TRAITS[fault.kind]
        role = Role.NATS if fault.target == "nats" else layout.place(fault.target).role
        assert role in trait.roles
        assert trait.least_s <= fault.for_s <= trait.most_s + 0.01
        if fault.kind is Kind.DISK_FULL:
            assert layout.place(fault.target).has_disk
        if trait.of_vllm:
            assert layout.place(fault.target).has_vllm
    kinds = Counter(fault.kind for fault in schedule.faults)
    if count >= len(kinds_in(layout)):
        assert set(kinds) == set(kinds_in(layout)), "each at least once"
    else:
        assert max(kinds.values()) == 1, "none twice while others have not been"


def test_other_seeds_are_other_schedules() -> None:
    assert Schedule.of(1, 60, 25, LAYOUT) != Schedule.of(2, 60, 25, LAYOUT)


@pytest.mark.parametrize("layout", [LAYOUT, VLLM], ids=["own", "vllm"])
def test_all_processes_are_hit_in_a_long_run(layout: Layout) -> None:
    hit = {fault.target for fault in Schedule.of(5, 600, 200, layout).faults}
    assert hit == {place.name for place in layout.places} | {"nats"}


def test_every_kind_can_happen_somewhere() -> None:
    assert {*kinds_in(LAYOUT), *kinds_in(VLLM)} == set(Kind)
    assert Kind.VLLM_ENGINE_KILL not in kinds_in(LAYOUT)
    assert Kind.VAULT_SLOW not in kinds_in(VLLM)


def test_kinds_can_be_chosen() -> None:
    schedule = Schedule.of(1, 60, 10, LAYOUT, (Kind.KILL,))
    assert {fault.kind for fault in schedule.faults} == {Kind.KILL}
    roles = Counter(LAYOUT.place(fault.target).role for fault in schedule.faults)
    assert set(roles) == {Role.WORKER, Role.INGRESS, Role.PLACEMENT, Role.VAULT}, "it goes from role to role"


def test_a_group_always_has_somebody_else() -> None:
    for layout in (LAYOUT, VLLM):
        for place in layout.processes:
            assert len(layout.group_of(place.name)) >= 2


def test_the_catalogue() -> None:
    cases = catalogue(7, WANTED)
    assert cases == catalogue(7, WANTED)
    assert cases != catalogue(8, WANTED)
    assert len({case.name for case in cases}) == 44
    for model in (REAL, FAKE):
        assert {case.transport for case in cases if case.model == model} == set(Transport), "all transports"
    asked = [case.sampling for case in cases]
    for field in ("n", "stop", "beams", "logprobs", "frequency_penalty", "repetition_penalty", "seed", "top_k"):
        assert any(field in sampling for sampling in asked), field
    prefixes = Counter(case.ids[:64] for case in cases if len(case.ids) > 100)
    assert max(prefixes.values()) > 1, "some share a prefix"
    assert {case.tenant for case in cases} == {"public", "acme"}
