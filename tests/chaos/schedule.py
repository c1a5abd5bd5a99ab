"""What breaks when: from a seed alone, so that a run can be repeated. Pure.

A fault's time is when it may begin at the earliest: whoever carries it out first waits until what its promise assumes
is there (the others of its group are ready; a NATS outage has the fleet to itself).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.layout import Layout, Place, Role


class Kind(StrEnum):
    KILL = "kill -9"
    STOP_SHORT = "stopped shortly"
    STOP_LONG = "stopped, wakes later"
    DRAIN = "drain (SIGTERM)"
    UPGRADE = "upgrade to the other wire version"
    PARTITION = "partition"
    CUT = "connections cut"
    CLOCK = "clock jump"
    FRAMES_LOST = "frames lost"
    FRAMES_DUPLICATED = "frames duplicated"
    FRAMES_REORDERED = "frames reordered"
    FRAMES_STALE = "stale frames"
    EVENTS_MANGLED = "block events lost and repeated"
    DISK_FULL = "disk full"
    VAULT_SLOW = "vault slow"
    VAULT_LYING = "vault lying"
    NATS_KILL = "NATS server killed"
    NATS_STOP = "NATS server stopped, wakes"
    NATS_DRAIN = "NATS server restarted"
    VLLM_ENGINE_KILL = "kill -9 of vLLM's EngineCore"
    VLLM_SERVER_KILL = "kill -9 of vLLM's server"
    VLLM_WORKER_KILL = "kill -9 of vLLM's Worker"
    VLLM_HOST_KILL = "kill -9 of vLLM and its sidecar"
    VLLM_STOP = "vLLM's EngineCore stopped"
    VLLM_HANG = "vLLM's EngineCore stopped, wakes later"


@dataclass(frozen=True, slots=True)
class Trait:
    """Whom a kind may hit, for how long, and how often beside the others."""

    roles: tuple[Role, ...]
    least_s: float
    most_s: float
    weight: int
    of_vllm: bool = False  # only those beside a vLLM server
    alone: bool = False  # nothing else may be broken, nor recover, meanwhile


_PROCESSES = (Role.WORKER, Role.INGRESS, Role.PLACEMENT, Role.VAULT)
_READERS = (Role.INGRESS, Role.CLIENT)

TRAITS: dict[Kind, Trait] = {
    Kind.KILL: Trait(_PROCESSES, 0, 0, 5),
    Kind.STOP_SHORT: Trait(_PROCESSES, 0.2, 1.2, 3),
    Kind.STOP_LONG: Trait((Role.WORKER, Role.PLACEMENT, Role.VAULT, Role.INGRESS), 4.0, 7.0, 3),
    Kind.DRAIN: Trait(_PROCESSES, 0, 0, 4),
    Kind.UPGRADE: Trait(_PROCESSES, 0, 0, 4),
    Kind.PARTITION: Trait((*_PROCESSES, Role.CLIENT), 0.5, 6.0, 4),
    Kind.CUT: Trait((*_PROCESSES, Role.CLIENT), 0, 0, 2),
    Kind.CLOCK: Trait(_PROCESSES, 2.0, 5.0, 2),
    Kind.FRAMES_LOST: Trait(_READERS, 1.5, 3.0, 2),
    Kind.FRAMES_DUPLICATED: Trait(_READERS, 1.5, 3.0, 2),
    Kind.FRAMES_REORDERED: Trait(_READERS, 1.5, 3.0, 2),
    Kind.FRAMES_STALE: Trait(_READERS, 1.5, 3.0, 2),
    Kind.EVENTS_MANGLED: Trait((Role.PLACEMENT,), 1.5, 3.0, 2),
    Kind.DISK_FULL: Trait((Role.VAULT,), 2.0, 4.0, 1),
    Kind.VAULT_SLOW: Trait((Role.VAULT,), 2.0, 4.0, 1),
    Kind.VAULT_LYING: Trait((Role.VAULT,), 2.0, 4.0, 1),
    Kind.NATS_KILL: Trait((Role.NATS,), 0.2, 4.0, 1, alone=True),
    Kind.NATS_STOP: Trait((Role.NATS,), 0.5, 5.0, 1, alone=True),
    Kind.NATS_DRAIN: Trait((Role.NATS,), 0.0, 1.0, 1, alone=True),
    Kind.VLLM_ENGINE_KILL: Trait((Role.WORKER,), 0, 0, 2, of_vllm=True),
    Kind.VLLM_SERVER_KILL: Trait((Role.WORKER,), 0, 0, 2, of_vllm=True),
    Kind.VLLM_WORKER_KILL: Trait((Role.WORKER,), 0, 0, 2, of_vllm=True),
    Kind.VLLM_HOST_KILL: Trait((Role.WORKER,), 0, 0, 2, of_vllm=True),
    Kind.VLLM_STOP: Trait((Role.WORKER,), 0.5, 8.0, 4, of_vllm=True),
    Kind.VLLM_HANG: Trait((Role.WORKER,), 32.0, 36.0, 1, of_vllm=True),
}


def kinds_in(layout: Layout) -> tuple[Kind, ...]:
    """What can break there."""
    roles = {place.role for place in layout.places} | {Role.NATS}
    return tuple(
        kind
        for kind, trait in TRAITS.items()
        if not roles.isdisjoint(trait.roles) and (layout.has_vllm or not trait.of_vllm)
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that breaks: `target` is a process's name, or `nats`. `seed` is for what it draws itself."""

    number: int
    at_s: float
    kind: Kind
    target: str
    for_s: float
    seed: int

    def __str__(self) -> str:
        lasting = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"#{self.number} at {self.at_s:.1f} s: {self.target}: {self.kind.value}{lasting}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """All faults of a run, in order."""

    seed: int
    duration_s: float
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int, duration_s: float, count: int, layout: Layout, kinds: tuple[Kind, ...] = ()) -> Schedule:
        """`count` faults in equal steps, more or less: each kind once, and then about as often as its weight says."""
        chance = random.Random(seed)
        drawn = _kinds(chance, count, kinds or kinds_in(layout))
        step = duration_s / max(1, count)
        turns = _Turns(chance, layout)
        faults = []
        for number, kind in enumerate(drawn):
            trait = TRAITS[kind]
            target = "nats" if trait.roles == (Role.NATS,) else turns.next(kind, trait.roles).name
            at_s = (number + chance.uniform(0.0, 0.8)) * step
            for_s = round(chance.uniform(trait.least_s, trait.most_s), 2)
            faults.append(Fault(number, round(at_s, 2), kind, target, for_s, chance.getrandbits(32)))
        return cls(seed, duration_s, tuple(faults))

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


def _kinds(chance: random.Random, count: int, kinds: tuple[Kind, ...]) -> list[Kind]:
    """Rounds of shuffled kinds: first each once, then by weight."""
    once = list(kinds)
    chance.shuffle(once)
    weighted = [kind for kind in kinds for _ in range(TRAITS[kind].weight)]
    out = once[:count]
    while len(out) < count:
        chance.shuffle(weighted)
        out += weighted[: count - len(out)]
    return out


_FIRST = (Role.WORKER, Role.INGRESS, Role.WORKER, Role.PLACEMENT, Role.VAULT, Role.CLIENT)


class _Turns:
    """Each member of a group has its turn before one has a second one; and a kind goes from role to role, those first
    that clients would notice first."""

    def __init__(self, chance: random.Random, layout: Layout) -> None:
        self._chance = chance
        self._layout = layout
        self._groups: dict[Kind, list[str]] = {}
        self._members: dict[str, list[Place]] = {}

    def next(self, kind: Kind, roles: tuple[Role, ...]) -> Place:
        waiting = self._groups.setdefault(kind, [])
        if not waiting:
            places = [p for p in self._layout.places if p.role in roles and (p.has_disk or kind is not Kind.DISK_FULL)]
            waiting += self._in_order({place.group: place.role for place in places})
        group = waiting.pop()
        if kind is Kind.DISK_FULL:
            return next(place for place in self._layout.places if place.has_disk)
        members = self._members.setdefault(group, [])
        if not members:
            members += [place for place in self._layout.places if place.group == group]
            self._chance.shuffle(members)
        return members.pop()

    def _in_order(self, role_of: dict[str, Role]) -> list[str]:
        """Groups, the first one last."""
        left = sorted(role_of)
        self._chance.shuffle(left)
        out = []
        for role in (*_FIRST, *(role_of[group] for group in left)):
            found = next((group for group in left if role_of[group] is role), None)
            if found is not None:
                left.remove(found)
                out.append(found)
        return out[::-1]
