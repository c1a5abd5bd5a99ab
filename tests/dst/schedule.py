"""What breaks in a run, drawn from its seed: a random subset of kinds, each at a rate of its own. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    KILL = "kill -9"
    PAUSE = "stopped, wakes"
    PARTITION = "partition"
    DEAF = "hears nothing"
    DUMB = "is heard by nobody"
    CUT = "connection reset"
    SLOW = "slow links"
    LOST = "messages lost"
    REPEATED = "messages repeated"
    CLOCK = "clock jump"
    NATS_KILL = "NATS killed"
    NATS_HANG = "NATS stopped, wakes"
    NATS_LEADERLESS = "JetStream without a leader"


OF_ALL = (Kind.NATS_KILL, Kind.NATS_HANG, Kind.NATS_LEADERLESS, Kind.SLOW)
NEVER_OF_CLIENTS = (Kind.KILL, Kind.PAUSE)
# (shortest, longest) in seconds: a kill lasts until its supervisor starts it again.
LASTS_S = {
    Kind.KILL: (0.2, 6.0), Kind.PAUSE: (0.05, 9.0), Kind.PARTITION: (0.05, 8.0), Kind.DEAF: (0.05, 8.0),
    Kind.DUMB: (0.05, 8.0), Kind.CUT: (0.0, 0.0), Kind.SLOW: (0.5, 8.0), Kind.LOST: (0.5, 6.0),
    Kind.REPEATED: (0.5, 6.0), Kind.CLOCK: (0.0, 0.0), Kind.NATS_KILL: (0.1, 6.0), Kind.NATS_HANG: (0.1, 9.0),
    Kind.NATS_LEADERLESS: (0.1, 6.0),
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


def drawn(seed: int, members: Sequence[str], clients: Sequence[str], until_s: float) -> tuple[Fault, ...]:
    """In order."""
    chance = random.Random(seed)
    kinds = chance.sample(list(Kind), chance.randint(1, 5))
    faults = []
    for _ in range(chance.choice((1, 2, 4, 8, 16))):
        kind = chance.choice(kinds)
        among = ["nats"] if kind in OF_ALL else [*members, *(() if kind in NEVER_OF_CLIENTS else clients)]
        for_s = chance.uniform(*LASTS_S[kind]) * chance.choice((0.1, 1.0))
        at_s = chance.uniform(0.0, until_s)
        faults.append(Fault(at_s, kind, chance.choice(among), min(for_s, until_s - at_s), chance.random()))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
