"""What breaks in a run, drawn from its seed: a random subset of kinds, each at a rate of its own. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    KILL = "kill -9"
    PAUSE = "stopped, wakes"
    TWIN = "stopped, another life begins, it wakes"
    DRAIN = "drain (SIGTERM)"
    UPGRADE = "upgrade to the other wire version"
    SCALE_UP = "one worker more"
    PARTITION = "partition"
    DEAF = "hears nothing"
    DUMB = "is heard by nobody"
    CUT = "connections reset"
    HALF_OPEN = "data plane half open"
    SLOW = "slow links"
    LOST = "messages lost"
    REPEATED = "messages repeated"
    FLIPPED = "data plane's bytes flipped"
    CLOCK = "clock jump"
    POWER_CUT = "power cut"
    DISK_LOST = "kill -9, its disk is lost"
    DISK_FULL = "disk full"
    DISK_SLOW = "disk slow"
    DISK_FAILS = "disk fails"
    DISK_ROTS = "a bit of the disk turns"
    NATS_KILL = "NATS killed"
    NATS_HANG = "NATS stopped, wakes"
    NATS_LEADERLESS = "JetStream without a leader"
    APART = "regions apart"
    LIES = "a vault that lies"
    KEYS = "a new key of the data plane"


LIVES = (0.2, 6.0)  # until a supervisor starts it again
SINGLE = {"n": "nats", "d": "v0"}  # the server, and the vault with a disk
# Whom it hits, by the first letter of names or one of these, and shortest and longest time in seconds.
TRAITS: dict[Kind, tuple[str, tuple[float, float]]] = {
    Kind.KILL: ("fpvi", LIVES), Kind.PAUSE: ("fpvi", (0.05, 9.0)), Kind.TWIN: ("fpi", (0.05, 9.0)),
    Kind.DRAIN: ("fpvi", LIVES), Kind.UPGRADE: ("fpvi", LIVES), Kind.SCALE_UP: ("f", (0.0, 0.0)),
    Kind.PARTITION: ("fpvic", (0.05, 8.0)), Kind.DEAF: ("fpvic", (0.05, 8.0)), Kind.DUMB: ("fpvic", (0.05, 8.0)),
    Kind.CUT: ("fpvich", (0.0, 0.0)), Kind.HALF_OPEN: ("fv", (0.0, 0.0)), Kind.SLOW: ("n", (0.5, 8.0)),
    Kind.LOST: ("fpvic", (0.5, 6.0)), Kind.REPEATED: ("fpvic", (0.5, 6.0)), Kind.FLIPPED: ("fv", (0.5, 8.0)),
    Kind.CLOCK: ("fpvi", (0.0, 0.0)), Kind.POWER_CUT: ("d", LIVES), Kind.DISK_LOST: ("d", LIVES),
    Kind.DISK_FULL: ("d", (0.5, 8.0)), Kind.DISK_SLOW: ("d", (0.5, 8.0)), Kind.DISK_FAILS: ("d", (0.5, 8.0)),
    Kind.DISK_ROTS: ("d", (0.0, 0.0)), Kind.NATS_KILL: ("n", (0.1, 6.0)), Kind.NATS_HANG: ("n", (0.1, 9.0)),
    Kind.NATS_LEADERLESS: ("n", (0.1, 6.0)), Kind.APART: ("n", (0.1, 9.0)), Kind.LIES: ("v", (0.5, 9.0)),
    Kind.KEYS: ("n", (0.0, 0.0)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """`strength`: 0 to 1, of what may be more or less."""

    at_s: float
    kind: Kind
    target: str
    for_s: float
    strength: float

    def __str__(self) -> str:
        lasting = f" for {self.for_s:.2f} s" if self.for_s else ""
        return f"{self.target}: {self.kind.value}{lasting}"


def drawn(seed: int, names: Sequence[str], until_s: float, *, regions: int = 1) -> tuple[Fault, ...]:
    """In order."""
    chance = random.Random(seed)
    kinds = chance.sample([kind for kind in Kind if regions > 1 or kind is not Kind.APART], chance.randint(1, 5))
    faults = []
    for _ in range(chance.choice((1, 2, 4, 8, 16))):
        kind = chance.choice(kinds)
        whom, lasts_s = TRAITS[kind]
        target = SINGLE.get(whom) or chance.choice([name for name in names if name[0] in whom])
        for_s = chance.uniform(*lasts_s) * chance.choice((0.1, 1.0))
        at_s = chance.uniform(0.0, until_s)
        faults.append(Fault(at_s, kind, target, min(for_s, until_s - at_s), chance.random()))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
