"""What an ingress may be told: limits, times and defaults. Pure; `settings` reads it, everything here is passed in.

Sizes are in bytes, tokens or characters as named, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.ingress.limits.run_memory import DEFAULT_BYTES


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of what tenants may keep. A turn's lease outlives three missed renewals."""

    idle_expiry_s: float = 86_400.0
    per_tenant: int = 100_000
    max_tokens: int = 131_072  # history of one session, the running turn's prompt and max_tokens included
    lease_s: float = 15.0
    # For a JetStream without a leader. A commit renews no lease: with the third of it since the last renewal, and the
    # 2 s of the last try, this is no longer than the lease.
    commit_timeout_s: float = 8.0
    sweep_period_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How long what a request brought is kept once it has ended or its clients have left; `replay_s` for requests with
    an Idempotency-Key. `bytes` bound the memory of such: the oldest give way; `running_bytes` that of those that run.
    `readers` bound who reads one at once."""

    grace_s: float = 60.0
    replay_s: float = 600.0
    bytes: int = 64 * 1024 * 1024
    readers: int = 8
    running_bytes: int = DEFAULT_BYTES


@dataclass(frozen=True, slots=True)
class WebRules:
    """`own_hosts`: what this host is called; `allowed_hosts`: other names, None: not set; `cors_origins`: whose
    pages may ask. `*` in either: all."""

    own_hosts: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """One ingress process. `id` is its member id: turns of sessions are leased in its name."""

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
    slo_ttft_s: float = 2.0  # targets by which goodput is counted
    slo_itl_s: float = 0.1
    default_model: str | None = None  # for /generate without `model_name`; else the only served model
    sessions: SessionLimits = SessionLimits()
    runs: RunLimits = RunLimits()
    web: WebRules = WebRules()
