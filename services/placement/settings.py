"""Settings of a placement process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvservice.settings import ServiceSettings
from services.placement.index.kv_indexer import MAX_BLOCKS, MAX_WORKERS
from services.placement.policies import DEFAULT_POLICY


class PlacementSettings(ServiceSettings):
    """Any number of replicas share the work through a queue group."""

    policy: str = Field(DEFAULT_POLICY, description="cost, kv_load, ring, bounded_ring, random, round_robin or direct")
    fleet_key: str = Field("", description="secret from which tenants' cache salts are derived; equal in all processes")
    index_blocks: int = Field(MAX_BLOCKS, ge=1024, description="blocks that the prefix index holds at most")
    max_workers: int = Field(MAX_WORKERS, ge=1, description="workers whose blocks it follows; memory grows with both")
    ledger_file: Path | None = Field(None, description="append ended decisions here, for kvfleet simulate")
    system_user: str | None = Field(None, description="user of NATS's system account: dead workers are seen at once")
    system_password: str | None = Field(None, description="its password")
    max_wait_s: float = Field(
        60.0, ge=0, description="longest wait that a bare producer's request without a deadline is let in for"
    )
    max_producer_priority: int = Field(
        0, ge=-100, le=100, description="highest priority of a bare producer's request: more is cut down to it"
    )
    prestart_s: float = Field(10.0, ge=0, description="how long to wait for the buckets at start")
