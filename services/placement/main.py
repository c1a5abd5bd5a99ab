"""Wiring of a placement process."""

from __future__ import annotations

import gc
import logging
import random

from kvfleet.placement.loop import PlacementLoop, PlacementParts
from kvfleet.placement.placement_metrics import readings
from kvfleet.placement.record.ledger_file import LedgerFile
from kvfleet.placement.settings import PlacementSettings
from kvproto.connection import Connection
from kvproto.errors import KvfleetError
from kvproto.messages import Role
from kvproto.subjects import PLACEMENT_INBOX
from kvservice import lifecycle
from kvservice.membership import connect, join, member_record
from kvservice.metrics import Probes
from kvservice.tracing_start import open_tracer

log = logging.getLogger(__name__)


async def _system_connection(settings: PlacementSettings) -> Connection | None:
    """A second connection as NATS's system user; without it dead workers are noticed later."""
    if settings.system_user is None and settings.system_nkey_seed is None:
        return None
    as_system = settings.model_copy(
        update={
            "nats_user": settings.system_user,
            "nats_password": settings.system_password,
            "nats_nkey_seed": settings.system_nkey_seed,
            "nats_credentials": None,
        }
    )
    try:
        return await connect(as_system, role="placement-sys", role_inbox=PLACEMENT_INBOX, fleet_key="")
    except KvfleetError as error:
        log.warning("no system account: %s; dead workers are noticed within 3.5 s instead of at once", error)
        return None


async def serve(settings: PlacementSettings, life: lifecycle.Lifecycle) -> None:
    probes = Probes(settings, life)
    tracer = open_tracer(settings, "placement", life)
    member = settings.member
    record = member_record(Role.PLACEMENT, member)
    connection, subjects, _ = await join(
        settings, life, "placement", PLACEMENT_INBOX, fleet_key=settings.fleet_key, prestart_s=settings.prestart_s
    )
    system = await _system_connection(settings)
    if system is not None:
        life.closing("system connection", system.close)
    ledger_file = LedgerFile(settings.ledger_file) if settings.ledger_file is not None else None
    if ledger_file is not None:
        life.closing("ledger file", ledger_file.close)
    loop = PlacementLoop(
        connection,
        subjects,
        record,
        settings.config(),
        chance=random.random,
        fleet_key=settings.fleet_key.encode(),
        parts=PlacementParts(ledger_file, system, tracer),
        on_fenced=lambda error: life.fatal(str(error)),
    )
    await loop.start()
    life.closing("placement", loop.stop)
    probes.ready(readings(loop, connection, {"nats": settings.nats_cert}))
    gc.collect()
    gc.freeze()  # a collection that looked at all of it would hold up decisions
    log.info("placement %s is ready", member)


def main() -> None:
    lifecycle.run_service("placement", PlacementSettings, serve)


if __name__ == "__main__":
    main()
