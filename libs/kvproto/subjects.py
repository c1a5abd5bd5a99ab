"""All subjects, buckets and inboxes of the fleet. Pure. Checks ids, so that no name can widen or split a subject.

Inboxes of ingresses and placements are sealed, as core NATS does not say who published a message:

    _ing.<id>-<seal>.>      seal = HMAC(fleet key, role and id), cut

Producers cannot read or make up such a name, so a message that names one comes from the fleet itself. Without a fleet
key names prove nothing.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvproto.errors import InvalidRequest
from kvproto.ids import DEFAULT_NAMESPACE, is_token, model_token

INGRESS_INBOX = "_ing"
PLACEMENT_INBOX = "_plc"
WORKER_INBOX = "_wrk"
VAULT_INBOX = "_vlt"
PRODUCER_INBOX = "_prd"
ADMIN_INBOX = "_adm"
SEALED_ROLES = (INGRESS_INBOX, PLACEMENT_INBOX)
SEAL_BYTES = 15  # 24 characters
MAX_INBOX = 512


def _token(what: str, value: str) -> str:
    if not is_token(value):
        raise InvalidRequest(f"must be 1 to 64 of A-Z a-z 0-9 _ -, got {value[:80]!r}", field=what)
    return value


def _fixed(rest: str) -> Callable[[Subjects], str]:
    return lambda self: f"{self.namespace}.{rest}"


def _of_model(verb: str) -> Callable[[Subjects, str, str], str]:
    return lambda self, tenant, model: f"{self.namespace}.{verb}.{_token('tenant', tenant)}.{model_token(model)}"


def _at_worker(verb: str) -> Callable[[Subjects, str], str]:
    """Subjects that one worker listens on, its requesters possibly in another region."""
    return lambda self, worker: f"{self._worker(worker)}.{verb}"


def _of_worker(kind: str) -> Callable[[Subjects, str], str]:
    """Subjects that one worker publishes on, or is told something about, in its own region."""
    return lambda self, worker: f"{self.namespace}.{kind}.{_token('worker', worker)}"


@dataclass(frozen=True, slots=True)
class Subjects:
    """Subjects under one namespace (default `kvf`). Raises InvalidRequest for an id that is no subject token.

    `region` is the own one, "" where there is only one. Only `<namespace>.region.>` ever leaves a region: there a
    worker of another region, `<region>.<id>`, is reached.
    """

    namespace: str = DEFAULT_NAMESPACE
    region: str = ""

    def __post_init__(self) -> None:
        _token("namespace", self.namespace)
        if self.region:
            _token("region", self.region)

    def _worker(self, worker: str) -> str:
        region, dot, own = worker.rpartition(".")
        base = self.namespace
        if dot and _token("worker", region) != self.region:
            base = self._region(region)
        return f"{base}.worker.{_token('worker', own)}"

    def _region(self, region: str) -> str:
        return f"{self.namespace}.region.{_token('region', region)}"

    # requests
    place = _of_model("place")
    generate = _of_model("generate")
    place_all = _fixed("place.*.*")
    generate_all = _fixed("generate.*.*")
    batch = _of_model("batch")  # a queue of requests that may wait
    batch_all = _fixed("batch.*.*")
    batch_lines_all = _fixed("batch.*.*.line")

    def batch_line(self, tenant: str, model: str) -> str:
        """The same of lines of batches, which ingresses alone put there."""
        return f"{self.batch(tenant, model)}.line"

    # one worker
    def worker_generate(self, worker: str, tenant: str) -> str:
        return f"{self._worker(worker)}.generate.{_token('tenant', tenant)}"

    # without a tenant: of any tenant's requests, for the fleet's own roles alone
    def worker_cancel(self, worker: str, tenant: str | None = None) -> str:
        return self._word(worker, "cancel", tenant)

    def worker_resend(self, worker: str, tenant: str | None = None) -> str:
        return self._word(worker, "resend", tenant)

    def worker_pause(self, worker: str, tenant: str | None = None) -> str:
        return self._word(worker, "pause", tenant)

    def _word(self, worker: str, verb: str, tenant: str | None) -> str:
        subject = f"{self._worker(worker)}.{verb}"
        return subject if tenant is None else f"{subject}.{_token('tenant', tenant)}"

    worker_generate_all = _at_worker("generate.*")
    worker_cancel_all = _at_worker("cancel.*")
    worker_resend_all = _at_worker("resend.*")
    worker_pause_all = _at_worker("pause.*")
    worker_admin = _at_worker("admin")
    worker_returns = _of_worker("returns")  # of paused conversations, said to it; placements hear them, too
    returns_all = _fixed("returns.*")

    # state of the fleet
    def heartbeat(self, member: str) -> str:
        return f"{self.namespace}.heartbeat.{_token('member', member)}"

    heartbeat_all = _fixed("heartbeat.*")
    events = _of_worker("events")
    events_all = _fixed("events.*")
    blocks = _of_worker("blocks")
    milestones = _of_worker("milestones")
    milestones_all = _fixed("milestones.*")
    placement_stats = _fixed("placement.stats")
    placement_bookings = _fixed("placement.bookings")
    placement_explain = _fixed("placement.explain")
    placement_preload = _fixed("placement.preload")
    placement_victim = _fixed("placement.victim")
    placement_capsules = _fixed("placement.capsules")  # bare producers' requests that a draining worker gives up
    placement_watches = _fixed("placement.watches")  # bare producers' requests that a draining placement watched
    ingress_usage = _fixed("ingress.usage")  # names tenants and keys: between a region's ingresses alone

    embedded_scale = _fixed("embedded.scale")  # of a fleet of one machine

    # other regions
    def region_place(self, region: str, tenant: str, model: str) -> str:
        return f"{self._region(region)}.place.{_token('tenant', tenant)}.{model_token(model)}"

    def region_place_all(self) -> str:
        return f"{self._region(self.region)}.place.*.*"

    def region_generate(self, region: str, tenant: str, model: str) -> str:
        return f"{self._region(region)}.generate.{_token('tenant', tenant)}.{model_token(model)}"

    def region_generate_all(self) -> str:
        return f"{self._region(self.region)}.generate.*.*"

    def region_worker(self, worker: str, verb: str) -> str:
        """Subject on which other regions reach an own worker; `verb`: `cancel`, `generate.*` and so on."""
        return f"{self._region(self.region)}.worker.{_token('worker', worker)}.{verb}"

    def region_summary(self, region: str) -> str:
        return f"{self._region(region)}.summary"

    region_summaries = _fixed("region.*.summary")

    # buckets
    @property
    def members_bucket(self) -> str:
        return f"{self.namespace}_members"

    @property
    def sessions_bucket(self) -> str:
        return f"{self.namespace}_sessions"

    @property
    def responses_bucket(self) -> str:
        return f"{self.namespace}_responses"

    @property
    def keys_bucket(self) -> str:
        return f"{self.namespace}_keys"

    @property
    def batches_bucket(self) -> str:
        return f"{self.namespace}_batches"

    @property
    def batch_stream(self) -> str:
        return f"{self.namespace}_batch"


def tenant_of_batch(subject: str) -> tuple[str, bool]:
    """Of a subject of the queue; and whether it is one of lines of batches."""
    tokens = subject.split(".")
    return tokens[2], len(tokens) > 4


def tenant_of_word(subject: str) -> str | None:
    """The tenant in a cancel, resend or pause; None: any tenant's requests, from a role of the fleet."""
    tokens = subject.split(".")
    at = 6 if tokens[1:2] == ["region"] else 4
    return tokens[at] if len(tokens) > at else None


def producers_tenant(inbox: str) -> str | None:
    """The tenant of a producer's inbox, or inbox prefix; None for a role of the fleet, which serves all."""
    role, _, rest = inbox.partition(".")
    return rest.partition(".")[0] if role == PRODUCER_INBOX else None


def member_key(role: str, member: str) -> str:
    """Key in the members bucket: `worker.<id>`, `placement.<id>`, `ingress.<id>`, `vault.<id>`."""
    return f"{_token('role', role)}.{_token('member', member)}"


def inbox_prefix(role_inbox: str, process: str) -> str:
    """Permissions let only this role subscribe there."""
    return f"{role_inbox}.{process}"


def request_inbox(prefix: str, request: str, attempt: int | str) -> str:
    """Inbox for acknowledgements, no-responders notices and unbatched frames of one attempt. `r` keeps it apart from
    nats-py's own `<prefix>.<unique>` (KV watches) and `<prefix>.<unique>.<n>` (replies)."""
    return f"{prefix}.r.{request}.{attempt}"


def request_inboxes(prefix: str) -> str:
    return f"{prefix}.r.>"


def batch_inbox(prefix: str) -> str:
    """Inbox for one message per worker and step, with frames of all sequences of one client."""
    return f"{prefix}.b"


def receipt_inbox(prefix: str, number: int) -> str:
    """Reply inbox of a worker for no-responders notices about inboxes that it sent to."""
    return f"{prefix}.l.{number}"


def receipt_inboxes(prefix: str) -> str:
    return f"{prefix}.l.*"


def is_inbox(subject: str) -> bool:
    """Whether answers may go there: inboxes begin with `_`, so that no requester can choose a fleet subject."""
    if not subject.startswith("_") or len(subject) > MAX_INBOX or not subject.isprintable():
        return False
    return not any(token in ("", "*", ">") or " " in token for token in subject.split("."))


def is_answer_inbox(subject: str) -> bool:
    """Whether one answer may go there: an inbox without streams, as a forged reply inbox could end another's stream."""
    tokens = subject.split(".")
    own = 3 if tokens[0] == PRODUCER_INBOX else 2  # tokens of the requester's prefix
    return is_inbox(subject) and tokens[own : own + 1] not in (["r"], ["b"], ["l"])


def may_read(inbox: str, tenant: str) -> bool:
    """Whether a tenant's frames may go there."""
    return producers_tenant(inbox) in (None, tenant)


def sealed_prefix(role_inbox: str, process: str, fleet_key: bytes) -> str:
    """As `inbox_prefix`, with a seal for sealed roles where there is a key."""
    if not fleet_key or role_inbox not in SEALED_ROLES:
        return inbox_prefix(role_inbox, process)
    return inbox_prefix(role_inbox, f"{process}-{_seal(role_inbox, process, fleet_key)}")


def is_of_the_fleet(inbox: str, fleet_key: bytes) -> bool:
    """Whether the inbox is an ingress's or a placement's, by its seal."""
    role, _, rest = inbox.partition(".")
    return role in SEALED_ROLES and (not fleet_key or _is_sealed(role, rest.partition(".")[0], fleet_key))


@lru_cache(maxsize=4096)
def _is_sealed(role_inbox: str, name: str, fleet_key: bytes) -> bool:
    process, _, given = name.rpartition("-")
    return hmac.compare_digest(given.encode(), _seal(role_inbox, process, fleet_key).encode())


def _seal(role_inbox: str, process: str, fleet_key: bytes) -> str:
    text = f"kvfleet inbox\n{role_inbox}\n{process}".encode()
    return base64.b32encode(hmac.digest(fleet_key, text, "sha256")[:SEAL_BYTES]).decode().lower()
