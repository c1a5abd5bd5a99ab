"""Settings of a placement process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.policies import POLICY_NAMES
from kvfleet.placement.workers.bookings import PhantomLimits
from kvservice.settings import ServiceSettings

DEFAULT = PlacementConfig()
SAME = {"policy", "index_blocks", "max_workers", "spill_wait_s", "max_wait_s", "max_producer_priority"}  # in the config


class PlacementSettings(ServiceSettings):
    policy: str = Field(DEFAULT.policy, description=f"{', '.join(POLICY_NAMES[:-1])} or {POLICY_NAMES[-1]}")
    fleet_key: str = Field(
        "", description="secret from which tenants' cache salts are derived; equal in all processes", repr=False
    )
    fleet_key_file: Path | None = Field(None, description="file that holds it")
    index_blocks: int = Field(DEFAULT.index_blocks, ge=1024, description="blocks that the prefix index holds at most")
    max_workers: int = Field(
        DEFAULT.max_workers, ge=1, description="workers whose blocks it follows; memory grows with both"
    )
    ledger_file: Path | None = Field(None, description="append ended decisions here, for kvfleet simulate")
    system_user: str | None = Field(None, description="user of NATS's system account: dead workers are seen at once")
    system_password: str | None = Field(None, description="its password", repr=False)
    system_nkey_seed: str | None = Field(None, description="its nkey seed, instead of user and password", repr=False)
    system_nkey_seed_file: Path | None = Field(None, description="file that holds it")
    max_wait_s: float = Field(
        60.0, ge=0, description="longest wait that a bare producer's request without a deadline is let in for"
    )
    spill_wait_s: float = Field(
        DEFAULT.spill_wait_s,
        ge=0,
        description="requests that would wait longer may go to another region where they wait half as long",
    )
    max_producer_priority: int = Field(
        DEFAULT.max_producer_priority,
        ge=-100,
        le=100,
        description="highest priority of a bare producer's request: more is cut down to it",
    )
    max_unaccepted: int = Field(
        DEFAULT.phantoms.requests,
        ge=1,
        description="requests of a tenant that count at a worker before it has accepted them; of more, the newest do",
    )
    max_unaccepted_s: float = Field(
        DEFAULT.phantoms.seconds,
        gt=0,
        description="the same in seconds of the worker's prefill; six times as much for a tenant of which everything "
        "was sent in the last minute",
    )
    models: str = Field(
        "", description="models of this fleet, separated by commas: they have signals, and requests for them count, "
        "while nobody serves them"
    )  # fmt: skip
    target_ttft_s: float = Field(
        DEFAULT.rules.target_ttft_s, gt=0, description="wait for a first token that the fleet is sized for"
    )
    min_replicas: int = Field(
        DEFAULT.rules.minimum, ge=0, description="fewest workers of a model that are ever desired; 0: none if unasked"
    )
    max_replicas: int = Field(DEFAULT.rules.maximum, ge=1, description="most workers of a model that are ever desired")
    scale_up_above: float = Field(
        DEFAULT.rules.up_above, gt=0, le=1, description="saturation above which more workers are desired"
    )
    scale_up_s: float = Field(DEFAULT.rules.up_s, gt=0, description="after so many seconds above it")
    scale_down_below: float = Field(
        DEFAULT.rules.down_below, ge=0, lt=1, description="saturation below which one fewer is desired"
    )
    scale_down_s: float = Field(DEFAULT.rules.down_s, gt=0, description="after so many seconds below it")
    scale_down: Literal["cheapest", "ordinal"] = Field(
        "cheapest", description="ordinal: the highest one goes, as of a StatefulSet; it gets nothing new while it is to"
    )
    prestart_s: float = Field(10.0, ge=0, description="how long to wait for the buckets at start")

    @model_validator(mode="after")
    def _limits_are_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}")
        if self.scale_down_below * 2 > self.scale_up_above:
            raise ValueError("scale_down_below must be at most half of scale_up_above, else one undoes the other")
        return self

    def config(self) -> PlacementConfig:
        """The loop adds its region, and whether decisions are recorded."""
        return PlacementConfig(
            **self.model_dump(include=SAME),
            phantoms=PhantomLimits(self.max_unaccepted, self.max_unaccepted_s),
            rules=Rules(
                self.target_ttft_s,
                self.min_replicas,
                self.max_replicas,
                self.scale_up_above,
                self.scale_up_s,
                self.scale_down_below,
                self.scale_down_s,
                aim=0.75 * self.scale_up_above,  # in between
            ),
            models=tuple(dict.fromkeys(name for one in self.models.split(",") if (name := one.strip()))),
            by_ordinal=self.scale_down == "ordinal",
        )
