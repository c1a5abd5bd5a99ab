"""A vault as a process, and what its clients and listeners do: keys, connections, members, events, snapshots."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Message
from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.client import DataPlaneClient, GetStatus, PutStatus
from kvproto.dataplane.keys import KeyRing, ensure_key, follow_keys
from kvproto.messages import Heartbeat, KvEvents, MemberRecord, Snapshot, SnapshotRequest
from kvproto.subjects import Subjects
from kvservice import launch
from tests.support.kv_blocks import ROOT, Block, hashes
from tests.support.kv_events import decode_events
from tests.support.waiting import LIMIT_S, until


class Fleet:
    """A connection that hears everything vaults say, and the data plane's keys."""

    def __init__(self, nats_url: str, subjects: Subjects, connection: Connection, folder: Path) -> None:
        self.nats_url = nats_url
        self.subjects = subjects
        self.connection = connection
        self.folder = folder
        self.ring = KeyRing()
        self.events: list[KvEvents] = []
        self.beats: list[Heartbeat] = []
        self.parts: list[Snapshot] = []
        self.vaults: list[Vault] = []

    @classmethod
    async def open(cls, nats_url: str, subjects: Subjects, folder: Path) -> Fleet:
        connection = await Connection.open(nats_url, name="listener", inbox_prefix="_plc.listener")
        fleet = cls(nats_url, subjects, connection, folder)
        await ensure_key(await Bucket.open(connection, subjects.keys_bucket))
        fleet.keys = await follow_keys(connection, subjects, fleet.ring)
        for subject, callback in (
            (subjects.events_all(), fleet._on_event),
            (subjects.heartbeat_all(), fleet._on_beat),
            ("_plc.listener.s", fleet._on_part),
        ):
            await connection.subscribe(subject, callback)
        await connection.synced()
        return fleet

    async def close(self) -> None:
        for vault in self.vaults:
            vault.kill()
        await self.keys.stop()
        await self.connection.close()

    async def _on_event(self, message: Message) -> None:
        self.events.append(decode_events(message.data))

    async def _on_beat(self, message: Message) -> None:
        self.beats.append(codec.decode(Heartbeat, message.data))

    async def _on_part(self, message: Message) -> None:
        self.parts.append(codec.decode(Snapshot, message.data))

    async def ask_snapshot(self, vault: str) -> None:
        question = codec.encode(SnapshotRequest())
        await self.connection.publish(self.subjects.blocks(vault), question, reply="_plc.listener.s")

    async def snapshot(self, vault: str) -> set[bytes]:
        """What it holds now, all parts put together."""
        self.parts.clear()
        await self.ask_snapshot(vault)
        await until(lambda: self.parts and len(self.parts) == self.parts[0].parts)
        return {one for part in self.parts for one in split(part.hashes)}

    async def record(self, vault: str) -> MemberRecord | None:
        entry = await (await Bucket.open(self.connection, self.subjects.members_bucket)).get(f"vault.{vault}")
        return None if entry.value is None else codec.decode(MemberRecord, entry.value)

    async def start(self, vault: str = "v0", *flags: str, log_level: str = "warning") -> Vault:
        """Returns once it is registered anew."""
        before = await self.record(vault)
        started = Vault(self, vault, flags, log_level)
        self.vaults.append(started)
        end = time.monotonic() + LIMIT_S
        while (record := await self.record(vault)) is None or (before is not None and record.epoch == before.epoch):
            if started.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"not registered (exit {started.process.returncode}):\n{started.errors()}")
            await asyncio.sleep(0.02)
        started.record = record
        return started

    def held(self, epoch: str) -> set[bytes]:
        """As the events of one life tell it."""
        return replayed([event for event in self.events if event.epoch == epoch])


class Vault:
    """One process. `record` is what it registered."""

    def __init__(self, fleet: Fleet, name: str, flags: Sequence[str], log_level: str) -> None:
        self.fleet = fleet
        self.name = name
        self.record: MemberRecord
        self._log = fleet.folder / f"{name}-{uuid.uuid4().hex}.log"
        self._clients: list[DataPlaneClient] = []
        command = launch.command("kvfleet.vault.main", f"--id={name}", f"--nats-url={fleet.nats_url}")
        command += [f"--namespace={fleet.subjects.namespace}", f"--log-level={log_level}", *flags]
        with self._log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=errors, env={**os.environ, "TMPDIR": str(fleet.folder)}
            )

    def connect(self, *, tcp: bool = False, timeout_s: float = 5.0) -> DataPlaneClient:
        client = DataPlaneClient.connect(
            self.record.data_plane,
            self.fleet.ring,
            identity="w0",
            expect=self.name,
            same_host=not tcp,
            timeout_s=timeout_s,
        )
        self._clients.append(client)
        return client

    def kill(self) -> None:
        for client in self._clients:
            client.close()
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def errors(self) -> str:
        return self._log.read_text()

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


def replayed(events: Sequence[KvEvents]) -> set[bytes]:
    """Numbers without a gap; what is stored was not held, what is removed was."""
    held: set[bytes] = set()
    for number, event in enumerate(events, 1):
        assert event.seq == number
        for change in event.changes:
            for run in change.runs:
                for one in run.hashes:
                    assert (one in held) == change.removed
                    (held.discard if change.removed else held.add)(one)
    return held


def soon(seconds: float = LIMIT_S) -> float:
    return time.monotonic() + seconds


def put(client: DataPlaneClient, blocks: Sequence[Block], root: bytes = ROOT) -> list[PutStatus]:
    return client.put(root, [(one.header, memoryview(one.payload)) for one in blocks], soon())


def get(
    client: DataPlaneClient, asked: Sequence[bytes], root: bytes = ROOT, *, exact: bool = False
) -> list[bytes | None]:
    """What came whole, by place."""
    found: list[bytes | None] = [None] * len(asked)

    def on_block(at: int, header: BlockHeader, view: memoryview) -> bool:
        found[at] = bytes(view)
        return True

    def sink(at: int, header: BlockHeader) -> memoryview:
        return memoryview(bytearray(header.length))

    statuses = client.get(root, list(asked), exact, sink, on_block, soon())
    assert [status is GetStatus.OK for status in statuses] == [one is not None for one in found]
    return found


def payloads(blocks: Sequence[Block]) -> list[bytes]:
    return [one.payload for one in blocks]


__all__ = ["Fleet", "Vault", "get", "hashes", "payloads", "put", "replayed", "soon", "split", "until"]
