"""Settings of an ingress process, and the configuration of its parts. Sizes are in bytes, tokens or characters as
named, times in seconds."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from kvfleet.ingress.limits.admission import DEFAULT_BYTES
from kvfleet.ingress.limits.service_levels import Targets
from kvservice.settings import ServiceSettings


class IngressSettings(ServiceSettings):
    """Flags of the HTTP endpoint; limits are per process."""

    port: int = Field(8080, ge=0, le=65535, description="HTTP port; 0: any free one")
    listen_fd: int | None = Field(
        None,
        ge=3,
        description="accept on this inherited listening socket (systemd's socket activation: 3); --host and --port say "
        "where it listens",
    )
    api_keys_file: Path | None = Field(
        None,
        description="TOML or JSON file with hashed API keys, or a folder of such; taken up when it changes; no keys "
        "and no OIDC issuer: everybody may",
    )
    api_keys: str | None = Field(None, description="more of the same as text")
    oidc_issuer: str | None = Field(None, description="whose signed tokens (JWT) are accepted beside API keys: its URL")
    oidc_audience: str | None = Field(None, description="the audience that such a token must be for")
    oidc_jwks: str | None = Field(None, description="file or URL of its keys; absent: as the issuer's description says")
    oidc_algorithms: str = Field("RS256,ES256,EdDSA", description="signatures that are accepted: some of these")
    oidc_tenant_claim: str = Field("tenant", description="the claim that names the tenant")
    oidc_admin_claim: str | None = Field(None, description="the claim that makes an admin; absent: no token does")
    oidc_admin_value: str = Field("kvfleet-admin", description="what that claim is or holds")
    oidc_limits_claim: str | None = Field(None, description="the claim with limits of the token's bearer, as a key's")
    oidc_leeway_s: float = Field(60.0, ge=0, le=600, description="how far the issuer's clock may be off")
    audit_log: str | None = Field(None, description="file for one JSON line per act of a caller; -: stderr")
    tls_cert: Path | None = Field(None, description="certificate chain: serve https; taken up when it changes")
    tls_key: Path | None = Field(None, description="its key")
    trusted_proxies: str | None = Field(
        None, description="addresses or networks, separated by commas, whose X-Forwarded-For and -Proto are believed"
    )
    allowed_hosts: str | None = Field(
        None,
        description="names, separated by commas, under which it is asked beside localhost, this host's own and any "
        "address; *: all; absent: all where there are API keys or an issuer",
    )
    cors_origins: str = Field(
        "",
        description="origins, separated by commas, whose pages may ask from a browser (https://chat.example); *: all",
    )
    fleet_key: str = Field(
        "",
        description="secret from which request ids of Idempotency-Keys follow; equal in all processes; without it "
        "such a key is known to one ingress only, if the API keys are of several tenants",
        repr=False,
    )
    fleet_key_file: Path | None = Field(None, description="file that holds it")
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="longest request body")
    body_timeout_s: float = Field(30.0, gt=0, description="a request whose body takes longer to come is refused")
    max_streams: int = Field(1024, ge=1, description="most requests at once; more get 503 with Retry-After")
    keep_alive_s: int = Field(
        75, ge=1, description="how long idle connections stay open; longer than a load balancer in front keeps them"
    )
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
    stream_memory_bytes: int = Field(
        DEFAULT_BYTES,
        ge=1024 * 1024,
        description="memory for what running requests bring; at half of it new ones get 503, and one that holds "
        "more than an even share ends",
    )
    slo_ttft_s: float = Field(2.0, gt=0, description="goodput: the first token of a good request comes within this")
    slo_itl_s: float = Field(0.1, gt=0, description="goodput: and the others after this long on average")
    unready_s: float = Field(
        0.0, ge=0, description="SIGTERM: how long /readyz says 503 before new requests are refused (load balancers)"
    )
    drain_s: float = Field(3.0, ge=0, description="how long SIGTERM waits for running streams")
    max_file_bytes: int = Field(32 * 1024 * 1024, ge=1024, description="longest file of a batch")
    tenant_batch_bytes: int = Field(
        64 * 1024 * 1024, ge=0, description="files and results of one tenant's batches together; 0: it may have none"
    )
    tenant_batches: int = Field(64, ge=0, description="batches of one tenant that have not ended")
    batch_lines: int = Field(
        128, ge=0, description="requests that may wait (batches, kvf.batch) that run here at once; 0: none"
    )
    prestart_s: float = Field(10.0, ge=0, description="how long to wait for the buckets at start")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """A turn's lease outlives three missed renewals."""

    idle_expiry_s: float = 86_400.0
    per_tenant: int = 100_000
    max_tokens: int = 131_072  # history of one session, the running turn's prompt and max_tokens included
    lease_s: float = 15.0
    # For a JetStream without a leader. A commit renews no lease: a third of the lease, this, and the 2 s of the last
    # try together are no longer than the lease.
    commit_timeout_s: float = 8.0
    sweep_period_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """`grace_s`: how long an ended or parked run is kept; `replay_s`: the same with an Idempotency-Key. `bytes` bounds
    the memory of kept runs, `running_bytes` that of running ones, `readers` the readers of one run."""

    grace_s: float = 60.0
    replay_s: float = 600.0
    bytes: int = 64 * 1024 * 1024
    readers: int = 8
    running_bytes: int = DEFAULT_BYTES


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`lines` run here at once; the others are of a tenant, together with what other ingresses have of it."""

    max_file_bytes: int = 32 * 1024 * 1024
    tenant_bytes: int = 64 * 1024 * 1024
    tenant_batches: int = 64
    lines: int = 128
    ack_wait_s: float = 15.0  # a line whose ingress says nothing for so long goes to another one


@dataclass(frozen=True, slots=True)
class WebRules:
    """`own_hosts`: names of this host; `allowed_hosts`: other names, None: not set; `cors_origins`: of pages that may
    ask. `*`: all."""

    own_hosts: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """`id` is the process's member id, in whose name turns of sessions are leased."""

    id: str
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0  # a body that has not come by then is refused
    max_concurrent: int = 2048
    default_max_tokens: int = 1024  # of a chat that names no limit; never more than the context leaves
    keepalive_s: float = 5.0
    request_deadline_s: float = 600.0
    no_worker_timeout_s: float = 10.0  # how long a request waits for a worker of its model
    max_wait_s: float = 60.0  # a request that would wait longer for its start is refused, with a time to retry
    splice_bytes: int = 64 * 1024 * 1024
    tokenize_inline_chars: int = 4096  # longer texts are tokenised off the event loop (about 1 ms is spent on these)
    tokenizer_threads: int = 2
    fleet_key: bytes = b""  # the same at all ingresses: request ids of Idempotency-Keys follow from it
    targets: Targets = field(default_factory=Targets)  # by which goodput is counted
    sessions: SessionLimits = SessionLimits()
    runs: RunLimits = RunLimits()
    web: WebRules = WebRules()
    batches: BatchLimits = BatchLimits()


def config_of(settings: IngressSettings, member: str) -> IngressConfig:
    return IngressConfig(
        id=member,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        max_concurrent=settings.max_streams,
        default_max_tokens=settings.default_max_tokens,
        request_deadline_s=settings.request_deadline_s,
        max_wait_s=settings.max_wait_s,
        splice_bytes=settings.splice_memory_bytes,
        fleet_key=settings.fleet_key.encode(),
        targets=Targets(settings.slo_ttft_s, settings.slo_itl_s),
        sessions=SessionLimits(
            idle_expiry_s=settings.session_ttl_s,
            per_tenant=settings.max_sessions_per_tenant,
            max_tokens=settings.max_session_tokens,
        ),
        runs=RunLimits(
            settings.resume_grace_s,
            settings.replay_s,
            settings.resume_memory_bytes,
            running_bytes=settings.stream_memory_bytes,
        ),
        batches=BatchLimits(
            settings.max_file_bytes, settings.tenant_batch_bytes, settings.tenant_batches, settings.batch_lines
        ),
        web=WebRules(
            own_hosts=(settings.host, socket.gethostname()),
            allowed_hosts=listed(settings.allowed_hosts) if settings.allowed_hosts is not None else None,
            cors_origins=listed(settings.cors_origins),
        ),
    )


def listed(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())
