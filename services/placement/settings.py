"""Settings of a placement process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.index.kv_indexer import MAX_BLOCKS, MAX_WORKERS
from kvfleet.placement.policies import DEFAULT_POLICY
from kvservice.settings import ServiceSettings


class PlacementSettings(ServiceSettings):
    """Any number of replicas share the work through a queue group."""

    policy: str = Field(DEFAULT_POLICY, description="cost, kv_load, ring, bounded_ring, random, round_robin or direct")
    fleet_key: str = Field(
        "", description="secret from which tenants' cache salts are derived; equal in all processes", repr=False
    )
    fleet_key_file: Path | None = Field(None, description="file that holds it")
    index_blocks: int = Field(MAX_BLOCKS, ge=1024, description="blocks that the prefix index holds at most")
    max_workers: int = Field(MAX_WORKERS, ge=1, description="workers whose blocks it follows; memory grows with both")
    ledger_file: Path | None = Field(None, description="append ended decisions here, for kvfleet simulate")
    system_user: str | None = Field(None, description="user of NATS's system account: dead workers are seen at once")
    system_password: str | None = Field(None, description="its password", repr=False)
    system_nkey_seed: str | None = Field(None, description="its nkey seed, instead of user and password", repr=False)
    system_nkey_seed_file: Path | None = Field(None, description="file that holds it")
    max_wait_s: float = Field(
        60.0, ge=0, description="longest wait that a bare producer's request without a deadline is let in for"
    )
    spill_wait_s: float = Field(
        2.0, ge=0, description="requests that would wait longer may go to another region where they wait half as long"
    )
    max_producer_priority: int = Field(
        0, ge=-100, le=100, description="highest priority of a bare producer's request: more is cut down to it"
    )
    max_unaccepted: int = Field(
        256, ge=1, description="requests of a tenant that count at a worker before it has accepted them; of more, the "
        "newest do"
    )  # fmt: skip
    max_unaccepted_s: float = Field(
        10.0, gt=0, description="the same in seconds of the worker's prefill; six times as much for a tenant of which "
        "everything was sent in the last minute"
    )  # fmt: skip
    models: str = Field(
        "", description="models of this fleet, separated by commas: they have signals, and requests for them count, "
        "while nobody serves them"
    )  # fmt: skip
    target_ttft_s: float = Field(2.0, gt=0, description="wait for a first token that the fleet is sized for")
    min_replicas: int = Field(
        1, ge=0, description="fewest workers of a model that are ever desired; 0: none if unasked"
    )
    max_replicas: int = Field(16, ge=1, description="most workers of a model that are ever desired")
    scale_up_above: float = Field(0.8, gt=0, le=1, description="saturation above which more workers are desired")
    scale_up_s: float = Field(180.0, gt=0, description="after so many seconds above it")
    scale_down_below: float = Field(0.3, ge=0, lt=1, description="saturation below which one fewer is desired")
    scale_down_s: float = Field(600.0, gt=0, description="after so many seconds below it")
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

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for one in self.models.split(",") if (name := one.strip())))

    def rules(self) -> Rules:
        """What the autoscaler goes by; it aims in between."""
        return Rules(
            self.target_ttft_s,
            self.min_replicas,
            self.max_replicas,
            self.scale_up_above,
            self.scale_up_s,
            self.scale_down_below,
            self.scale_down_s,
            aim=0.75 * self.scale_up_above,
        )
