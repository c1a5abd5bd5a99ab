"""The parts that all routes of one ingress share. `Ingress` builds them."""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.limits.admission import Admission
from kvfleet.ingress.prompts.models import Models
from kvfleet.ingress.runs.runs import Runs
from kvfleet.ingress.sessions.session_index import SessionIndex
from kvfleet.ingress.settings import IngressConfig
from kvfleet.ingress.telemetry.metrics import IngressMetrics
from kvproto.client import Client


@dataclass(frozen=True, slots=True)
class IngressParts:
    """Each part is owned by the event loop."""

    client: Client
    config: IngressConfig
    tenancy: Tenancy
    admission: Admission
    models: Models
    index: SessionIndex  # with the sessions
    metrics: IngressMetrics
    runs: Runs
