"""Whom blocks can be had from, as the members view says. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvproto.messages import MemberRecord, Role, State, WorkerRecord


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """A vault or another worker, in one life of it. `host` decides whether its Unix socket can be reached."""

    id: str
    epoch: str
    host: str
    data_plane: tuple[str, ...]


def vaults_of(members: Iterable[MemberRecord]) -> list[SourceAddress]:
    """Those that take and give blocks: one that drains keeps its part of the ring until it is gone."""
    return [
        SourceAddress(member.id, member.epoch, member.host, member.data_plane)
        for member in members
        if member.role is Role.VAULT and member.data_plane and member.state in (State.READY, State.DRAINING)
    ]


def peers_of(workers: Iterable[WorkerRecord], me: WorkerRecord) -> list[SourceAddress]:
    """Workers whose blocks mean the same as this one's: same weights, same layout."""
    return [
        SourceAddress(worker.id, worker.epoch, worker.host, worker.data_plane)
        for worker in workers
        if worker.id != me.id
        and worker.data_plane
        and worker.kv_format == me.kv_format
        and worker.model_revision == me.model_revision
        and worker.state in (State.READY, State.DRAINING)
    ]
