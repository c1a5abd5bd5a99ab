"""What a run is made of: faults, requests, and how many processes of each kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.chaos.layout import TENANTS
from tests.dst.cases import Request, requests
from tests.dst.schedule import Fault, drawn

FLEET = {"f": 4, "p": 2, "v": 2, "i": 2}  # workers, placements, vaults, ingresses
CLIENTS = dict(zip(TENANTS, ("c0", "c1"), strict=True))
BARE = "b0"
HTTP = ("h0", "h1")  # the second one where there are two regions: sessions and responses are of one
HYBRID_SEED = 40  # the first one
BROKEN_S = 32.0  # until when faults begin and end


@dataclass(frozen=True, slots=True)
class Plan:
    """Of a run. `seed`: of the order in which things happen."""

    seed: int
    faults: tuple[Fault, ...]
    requests: tuple[Request, ...]
    fleet: Mapping[str, int] = field(default_factory=lambda: FLEET)

    @property
    def group(self) -> int:
        """Seeds that go on from the same start of a fleet."""
        return self.seed // 8

    @property
    def regions(self) -> tuple[str, ...]:
        return ("east", "west") if self.group % 4 == 3 else ("",)

    @property
    def hybrid(self) -> bool:
        """Whether the model has recurrent states."""
        return self.group % 6 == HYBRID_SEED // 8

    @classmethod
    def of(cls, seed: int) -> Plan:
        plan, names = cls(seed, (), tuple(requests(seed))), [*names_in(FLEET), *CLIENTS.values(), HTTP[0]]
        return replace(plan, faults=drawn(seed, names, BROKEN_S, regions=len(plan.regions)))


def names_in(fleet: Mapping[str, int]) -> list[str]:
    return [f"{kind}{at}" for kind, count in fleet.items() for at in range(count)]
