"""A lease of a slow JetStream: a write whose answer comes too late is not a lease that was lost."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.members import Lease
from kvproto.messages import MemberRecord, Role
from kvproto.subjects import Subjects, member_key
from kvservice.membership import member_record


class LateAnswers:
    """A real bucket; while `late`, what it writes is there, and its answer does not come in time."""

    def __init__(self, bucket: Bucket) -> None:
        self.late = False
        self._bucket = bucket
        self.get = bucket.get

    async def update(self, key: str, value: bytes, revision: int) -> int:
        found = await self._bucket.update(key, value, revision)
        if self.late:
            raise Unavailable(f"cannot write {key}: TimeoutError")
        return found


async def test_a_late_answer_loses_nothing(
    nats_url: str, fleet_buckets: Subjects, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    connection = await Connection.open(nats_url, name="lease", inbox_prefix="_adm.lease")
    bucket = await Bucket.open(connection, fleet_buckets.members_bucket)
    slow = LateAnswers(bucket)
    lease = Lease(slow, member_record(Role.VAULT, "v1"))  # type: ignore[arg-type]
    await lease.renew()
    first = lease.record.lease
    for _ in range(3):
        slow.late = True
        with pytest.raises(Unavailable):
            await lease.renew()
        slow.late = False
        await lease.renew()
        assert lease.record.lease == first
    assert not caplog.records
    key = member_key("vault", "v1")
    await bucket.delete(key)  # somebody took it for dead
    await lease.renew()
    held = (await bucket.get(key)).value
    assert held is not None
    assert codec.decode(MemberRecord, held).lease == lease.record.lease != first
    assert [record.getMessage() for record in caplog.records] == ["lease on vault.v1 was lost, registered again"]
    await connection.close()


async def test_the_first_is_waited_for(nats_url: str, fleet_buckets: Subjects) -> None:
    """A process that starts in an outage of a moment need not be started again."""
    connection = await Connection.open(nats_url, name="lease", inbox_prefix="_adm.lease")
    slow = LateAnswers(await Bucket.open(connection, fleet_buckets.members_bucket))
    lease = Lease(slow, member_record(Role.VAULT, "v1"))  # type: ignore[arg-type]
    slow.late = True
    with pytest.raises(Unavailable):
        await lease.take(0.3)
    taking = asyncio.create_task(lease.take())
    await asyncio.sleep(0.3)
    assert not taking.done()
    slow.late = False
    await taking
    assert lease.record.lease
    await connection.close()
