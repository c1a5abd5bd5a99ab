"""One question, many answers, one finding."""

from __future__ import annotations

import random

from kvfleet.worker.blocks.chain_location import BlockName, Finding
from kvfleet.worker.tiers.looking import Look
from kvproto.messages import Tier

NAMES = [BlockName(b"r" * 16, bytes([at]) * 16, b"p" * 16, b"\0" * 4) for at in range(10)]


class Asked:
    def __init__(self, *tiers: Tier) -> None:
        self.finding = Finding()
        self.ready = 0
        self.strays: dict[bytes, str] = {}
        self.look = Look(NAMES, self.finding, self._ready, self.strays.update)
        self.look.expect(tiers)

    def _ready(self) -> None:
        self.ready += 1
        assert self.finding.ready


def test_the_last_answer_completes_it() -> None:
    asked = Asked(Tier.VAULT, Tier.VAULT, Tier.PEER)
    asked.look.has(Tier.VAULT, "v1", range(4), owned=True)
    asked.look.answered(Tier.VAULT)
    asked.look.has(Tier.PEER, "w2", range(2), owned=True)
    asked.look.answered(Tier.PEER)
    assert asked.ready == 0
    asked.look.has(Tier.VAULT, "v2", [4, 5, 7], owned=True)
    asked.look.answered(Tier.VAULT)
    assert (asked.ready, asked.finding.vault, asked.finding.peer) == (1, 6, 2)
    assert not asked.strays


def test_what_cannot_become_better_waits_for_nobody() -> None:
    asked = Asked(Tier.VAULT, Tier.VAULT)
    asked.look.has(Tier.VAULT, "v1", range(10), owned=True)
    asked.look.answered(Tier.VAULT)
    assert (asked.ready, asked.finding.vault) == (1, 10)
    asked.look.answered(Tier.VAULT)
    asked.look.end()
    assert asked.ready == 1


def test_when_time_is_up_what_is_known_counts_and_nothing_later() -> None:
    asked = Asked(Tier.VAULT, Tier.PEER)
    asked.look.has(Tier.VAULT, "v1", range(3), owned=True)
    asked.look.end()
    assert (asked.ready, asked.finding.vault, asked.finding.peer) == (1, 3, 0)
    asked.look.has(Tier.VAULT, "v1", range(10), owned=True)
    asked.look.has(Tier.PEER, "w2", range(10), owned=True)
    asked.look.answered(Tier.PEER)
    assert (asked.ready, asked.finding.vault, asked.finding.peer) == (1, 3, 0)
    assert asked.look.is_over


def test_strays_are_what_is_of_use_and_not_at_its_owner() -> None:
    asked = Asked(Tier.VAULT, Tier.VAULT)
    asked.look.has(Tier.VAULT, "new", [0, 1, 4], owned=True)
    asked.look.answered(Tier.VAULT)
    asked.look.has(Tier.VAULT, "old", [1, 2, 3, 7], owned=False)
    asked.look.answered(Tier.VAULT)
    assert asked.finding.vault == 5
    assert asked.strays == {NAMES[2].hash: "old", NAMES[3].hash: "old"}


def test_any_order_of_answers_gives_the_same_finding() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        held = {f"v{at}": chance.sample(range(10), chance.randint(0, 10)) for at in range(3)}
        asked = Asked(*[Tier.VAULT] * 3)
        for vault in chance.sample(sorted(held), 3):
            asked.look.has(Tier.VAULT, vault, held[vault], owned=vault == "v0")
            asked.look.answered(Tier.VAULT)
        everything = set().union(*held.values())
        assert asked.finding.vault == next((at for at in range(10) if at not in everything), 10)
        assert asked.ready == 1
