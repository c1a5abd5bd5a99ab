"""The pacer on simulated engines: streams keep their pace, prompts advance, estimates follow what lasts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest

from kvfleet.worker.schedule.step_pacer import MIN_CHUNK, PROBE_EVERY, STEP_S, StepPacer


@dataclass
class Simulated:
    """A machine on which a step takes: a decode part, and per prompt token a base and a slope per position."""

    decode: float = 0.03
    base: float = 0.0008
    slope: float = 0.0
    noise: Callable[[], float] = lambda: 1.0
    seconds: list[float] = field(default_factory=list)  # of each step, without the noise
    chunks: list[int] = field(default_factory=list)

    def step(self, pacer: StepPacer, decodes: int, position: int, wanted: int) -> int:
        """One step with a prompt that wants so many tokens. Returns how many it was fed."""
        allowance = pacer.allowance(decodes)
        count = allowance.grant(position, wanted) if allowance.tokens else 0
        positions = count * (position + (count - 1) / 2)
        took = (self.decode if decodes else 0.0) + count * self.base + positions * self.slope
        self.seconds.append(took)
        self.chunks.append(count)
        if took:
            pacer.observe(decodes, count, positions, took * self.noise())
        return count

    def prompt(self, pacer: StepPacer, tokens: int, decodes: int = 8) -> None:
        position = 0
        while position < tokens:
            position += self.step(pacer, decodes, position, tokens - position)


def warm(machine: Simulated, pacer: StepPacer) -> None:
    machine.prompt(pacer, 128, decodes=0)
    for _ in range(20):
        machine.step(pacer, 8, 0, 0)
    machine.seconds.clear()
    machine.chunks.clear()


@pytest.mark.parametrize(
    ("decode", "base", "slope"),
    [
        (0.03, 0.0008, 0.0),  # a small model on a CPU
        (0.03, 0.0008, 4e-7),  # of which attention is a large part
        (0.008, 3e-5, 2e-9),  # an accelerator
        (0.3, 0.004, 1e-6),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_streams_beside_long_prompts_keep_their_pace(decode: float, base: float, slope: float, seed: int) -> None:
    chance = random.Random(seed)
    machine = Simulated(decode, base, slope, noise=lambda: chance.uniform(0.8, 1.25))
    pacer = StepPacer(2048)
    warm(machine, pacer)
    for _ in range(5):
        machine.prompt(pacer, 4000)
    machine.seconds.sort()
    assert machine.seconds[int(0.99 * len(machine.seconds))] < 3.5 * decode
    assert mean(machine.seconds) < 3 * decode
    with_prompt = [took for took in machine.seconds if took > decode]
    assert mean(with_prompt) > 1.7 * decode, "prompts get less than they could"


def test_one_step_in_a_row_of_them_shows_what_streams_alone_take() -> None:
    machine, pacer = Simulated(), StepPacer(2048)
    warm(machine, pacer)
    machine.prompt(pacer, 4000)
    assert [at for at, chunk in enumerate(machine.chunks) if not chunk][:2] == [PROBE_EVERY - 1, 2 * PROBE_EVERY - 1]
    machine.decode = 0.09  # more streams joined meanwhile
    machine.prompt(pacer, 8000)
    assert pacer.times.decode_seconds == pytest.approx(0.09, rel=0.1)


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_lasting_change_of_speed_is_followed(factor: float) -> None:
    machine, pacer = Simulated(), StepPacer(2048)
    warm(machine, pacer)
    machine.prompt(pacer, 4000)
    machine.decode *= factor
    machine.base *= factor
    for _ in range(6):
        machine.prompt(pacer, 4000)
    late = machine.seconds[-40:]
    assert 1.7 * machine.decode < mean(took for took in late if took > machine.decode)
    assert max(late) < 3 * machine.decode


def test_single_outliers_move_the_pace_by_little() -> None:
    chance = random.Random(1)
    machine = Simulated(noise=lambda: 20.0 if chance.random() < 0.03 else 1.0)
    pacer = StepPacer(2048)
    warm(machine, pacer)
    for _ in range(5):
        machine.prompt(pacer, 4000)
    assert max(machine.seconds) < 4 * machine.decode
    assert mean(machine.seconds) > 1.5 * machine.decode


def test_prompts_advance_even_where_the_target_cannot_be_kept() -> None:
    machine, pacer = Simulated(decode=0.01, base=0.1), StepPacer(2048)
    warm(machine, pacer)
    machine.prompt(pacer, 400)
    assert set(machine.chunks) == {MIN_CHUNK, 0}
    assert machine.chunks.count(0) <= len(machine.chunks) / PROBE_EVERY + 1


def test_a_target_above_what_streams_need_is_used() -> None:
    machine, pacer = Simulated(decode=0.01, base=0.0001), StepPacer(2048, itl_target_s=0.1)
    warm(machine, pacer)
    machine.prompt(pacer, 9000)
    assert mean(machine.chunks[2:8]) == pytest.approx(900, rel=0.1)


def test_without_streams_steps_are_as_large_as_allowed_but_not_long() -> None:
    fast, pacer = Simulated(base=1e-5), StepPacer(2048)
    fast.prompt(pacer, 10_000, decodes=0)
    assert fast.chunks[:4] == [2048] * 4
    slow, pacer = Simulated(base=0.002), StepPacer(2048)
    slow.prompt(pacer, 10_000, decodes=0)
    assert max(slow.seconds[1:-1]) <= 1.05 * STEP_S
    assert slow.seconds[-1] <= 1.55 * STEP_S
    assert min(slow.chunks[1:]) > 250, "no crumbs"


def test_a_prompt_that_a_little_more_than_a_step_would_end_is_not_cut() -> None:
    machine, pacer = Simulated(base=0.001), StepPacer(2048)
    machine.prompt(pacer, 600, decodes=0)
    for tokens in (1100, 1400, 1040):
        machine.chunks.clear()
        machine.prompt(pacer, tokens, decodes=0)
        assert machine.chunks == [tokens]
    machine.chunks.clear()
    machine.prompt(pacer, 1700, decodes=0)
    assert len(machine.chunks) == 2


def test_a_short_prompt_tells_nothing_of_long_ones() -> None:
    """Its step reads all weights all the same."""
    pacer = StepPacer(2048)
    pacer.observe(0, 1000, 1000 * 500, 1.0)
    for _ in range(20):
        pacer.observe(0, 2, 2000, 0.025)
    assert pacer.allowance(0).grant(0, 2000) > 900


def test_streams_of_which_nothing_is_known_yet_are_looked_at_first() -> None:
    machine, pacer = Simulated(), StepPacer(2048)
    machine.prompt(pacer, 100, decodes=0)
    machine.prompt(pacer, 4000)
    assert machine.chunks[1] == 0
    assert max(machine.seconds[1:]) < 3 * machine.decode


def test_several_prompts_share_one_step() -> None:
    machine, pacer = Simulated(), StepPacer(2048)
    warm(machine, pacer)
    allowance = pacer.allowance(8)
    whole = allowance.grant(0, 4000)
    allowance.spend(0, whole // 2)
    assert allowance.grant(0, 4000) == pytest.approx(whole - whole // 2, abs=1)
    allowance.spend(0, whole)
    assert allowance.grant(0) == 0


def test_without_a_clock_the_budget_is_all_there_is() -> None:
    pacer = StepPacer(10)
    assert [pacer.allowance(decodes).grant(0, 4000) for decodes in (0, 4, 9, 30)] == [10, 6, 1, 1]
