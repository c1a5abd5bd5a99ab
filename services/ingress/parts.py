"""What the routes of one ingress share: built once by `Ingress`, handed to each as one value."""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.limits.admission import Admission
from kvfleet.ingress.prompts.models import Models
from kvfleet.ingress.runs.runs import Runs
from kvfleet.ingress.sessions.turns import SessionBooks
from kvfleet.ingress.settings import IngressConfig
from kvfleet.ingress.telemetry.metrics import IngressMetrics
from kvproto.client import Client


@dataclass(frozen=True, slots=True)
class IngressParts:
    """Each part is owned by the event loop. `client` reaches the fleet, `tenancy` knows the callers, `admission` lets
    them in, `models` are those that are served, `books` keep the sessions, `runs` what requests have brought."""

    client: Client
    config: IngressConfig
    tenancy: Tenancy
    admission: Admission
    models: Models
    books: SessionBooks
    metrics: IngressMetrics
    runs: Runs
