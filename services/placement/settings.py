"""Settings of a placement process."""

from __future__ import annotations

from pydantic import Field

from kvservice.settings import ServiceSettings
from services.placement.policies import DEFAULT_POLICY


class PlacementSettings(ServiceSettings):
    """Any number of replicas share the work through a queue group."""

    policy: str = Field(DEFAULT_POLICY, description="ring, bounded_ring, random, round_robin or direct")
    system_user: str | None = Field(None, description="user of NATS's system account: dead workers are seen at once")
    system_password: str | None = Field(None, description="its password")
    prestart_s: float = Field(10.0, ge=0, description="how long to wait for the buckets at start")
