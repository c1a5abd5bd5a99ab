"""Settings of an ingress process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvservice.settings import ServiceSettings


class IngressSettings(ServiceSettings):
    """Flags of the HTTP endpoint; limits are per process."""

    port: int = Field(8080, ge=0, le=65535, description="HTTP port; 0: any free one")
    api_keys_file: Path | None = Field(
        None, description="TOML or JSON file with hashed API keys; absent: everybody may"
    )
    api_keys: str | None = Field(None, description="the same as text")
    fleet_key: str = Field(
        "",
        description="secret from which request ids of Idempotency-Keys follow; equal in all processes; without it "
        "such a key is known to one ingress only, if the API keys are of several tenants",
    )
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="longest request body")
    max_streams: int = Field(1024, ge=1, description="most requests at once; more get 503 with Retry-After")
    default_max_tokens: int = Field(1024, ge=1, description="bound where a chat names none")
    request_deadline_s: float = Field(600.0, gt=0, description="longest a request may take")
    session_ttl_s: float = Field(24 * 3600.0, gt=0, description="idle sessions are forgotten after this")
    max_sessions_per_tenant: int = Field(100_000, ge=1)
    max_session_tokens: int = Field(131_072, ge=1, description="longest history of one session")
    splice_memory_bytes: int = Field(256 * 1024 * 1024, ge=0, description="memory for ids of finished chat turns")
    max_wait_s: float = Field(
        60.0, ge=0, description="requests that would wait longer for a worker get 429 or 503 with Retry-After"
    )
    resume_grace_s: float = Field(
        60.0, ge=0, description="how long what a request brought is kept for a client that comes back (Last-Event-ID)"
    )
    replay_s: float = Field(600.0, ge=0, description="the same for requests with an Idempotency-Key")
    resume_memory_bytes: int = Field(
        64 * 1024 * 1024, ge=0, description="memory for ended and cut requests; the oldest give way"
    )
    unready_s: float = Field(
        0.0, ge=0, description="SIGTERM: how long /readyz says 503 before new requests are refused (load balancers)"
    )
    drain_s: float = Field(3.0, ge=0, description="how long SIGTERM waits for running streams")
    prestart_s: float = Field(10.0, ge=0, description="how long to wait for the buckets at start")
