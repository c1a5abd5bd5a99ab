"""Which processes a chaos fleet has. Pure.

Two models: `demo`, the real one, small, fp32, for exactness; `numbers`, the fake one, whose next token depends on every
token before it, for numbers. Where workers are vLLM's sidecars there is the real one alone. Every role has at least two
members, so that one may always be missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

REAL, FAKE = "demo", "numbers"
HALVES = ("prefill", "decode", "decode")  # of the fake one's workers, in turn
TENANTS = ("public", "acme")  # a client each


class Role(StrEnum):
    WORKER = "worker"
    INGRESS = "ingress"
    PLACEMENT = "placement"
    VAULT = "vault"
    CLIENT = "client"  # in the harness's own process: only its network breaks
    NATS = "nats"


@dataclass(frozen=True, slots=True)
class Place:
    """One process of the fleet. `group`: those that can do the same work; one of them is always left in peace."""

    name: str
    role: Role
    model: str = ""
    has_disk: bool = False
    has_vllm: bool = False  # a server of its own is its engine
    half: str = "both"  # of requests, that a worker is for

    @property
    def group(self) -> str:
        return f"{self.role.value}:{self.model}" if self.model else self.role.value


@dataclass(frozen=True, slots=True)
class Layout:
    """The fleet, without its NATS server, which is there once."""

    places: tuple[Place, ...]

    @classmethod
    def of(cls, *, real: int = 2, fake: int = 3, ingresses: int = 2, placements: int = 2, vaults: int = 2) -> Layout:
        return cls(
            (
                *(Place(f"v{at}", Role.VAULT, has_disk=at == 0) for at in range(vaults)),
                *(Place(f"p{at}", Role.PLACEMENT) for at in range(placements)),
                *(Place(f"r{at}", Role.WORKER, REAL) for at in range(real)),
                *(Place(f"f{at}", Role.WORKER, FAKE, half=HALVES[at % len(HALVES)]) for at in range(fake)),
                *(Place(f"i{at}", Role.INGRESS) for at in range(ingresses)),
                *(Place(f"c{at}", Role.CLIENT) for at in range(len(TENANTS))),
            )
        )

    @classmethod
    def of_vllm(cls) -> Layout:
        """Workers beside vLLM servers, of the real model alone. They have no tiers, so there are no vaults."""
        places = cls.of(fake=0, vaults=0).places
        return cls(tuple(replace(place, has_vllm=place.role is Role.WORKER) for place in places))

    @property
    def has_vllm(self) -> bool:
        return any(place.has_vllm for place in self.places)

    def of_role(self, role: Role) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.role is role)

    def place(self, name: str) -> Place:
        return next(place for place in self.places if place.name == name)

    def group_of(self, name: str) -> tuple[Place, ...]:
        group = self.place(name).group
        return tuple(place for place in self.places if place.group == group)

    @property
    def processes(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.role is not Role.CLIENT)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({place.model for place in self.places if place.model}))
