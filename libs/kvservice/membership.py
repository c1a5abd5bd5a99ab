"""Wiring: a process's record in the members bucket."""

from __future__ import annotations

import asyncio
import os
import socket
import time

from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import InvalidRequest, Unavailable
from kvproto.ids import is_token, new_epoch
from kvproto.messages import MemberRecord, Role, State


def member_record(role: Role, member: str, *, address: str = "", inbox: str = "") -> MemberRecord:
    """A fresh life of a process that holds no blocks. Raises InvalidRequest for an id that is no subject token."""
    if not is_token(member):
        raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field="id")
    return MemberRecord(
        id=member,
        epoch=new_epoch(),
        lease="",
        state=State.READY,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=codec.supported_versions(),
        address=address,
        inbox=inbox,
        started_unix_ms=int(time.time() * 1000),
    )


async def open_bucket(connection: Connection, name: str, patience_s: float) -> Bucket:
    """The bucket may be created at the same moment as this process starts: wait for it, within reason."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return await Bucket.open(connection, name)
        except Unavailable:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.25)
