"""What was deleted is nowhere: on no device, no host, in no vault's memory, and in no byte of a disk."""

from __future__ import annotations

from collections.abc import Iterator

from kvproto.block_hash import pack_ids
from tests.dst.world import Vault, World
from tests.support.fake_fleet import FakeWorker

RUN = 8  # tokens in a row that no other text has: of `text_of`, 7 may be in two


def found(world: World, texts: list[str]) -> Iterator[str]:
    """Where something of them is."""
    workers = {name: p.made for name, p in world.processes.items() if isinstance(p.made, FakeWorker)}
    if not texts or not workers:
        return
    encode = next(iter(workers.values())).loop.parts.text.encode
    runs: dict[bytes, str] = {}
    for text in texts:
        ids = encode(text, begins=False, field="text")
        runs |= {pack_ids(ids[at : at + RUN]): text for at in range(len(ids) - RUN + 1)}
    places = [(name, part) for name, worker in workers.items() for part in _of_worker(worker)]
    places += [(name, part) for name, p in world.processes.items() if isinstance(p.made, Vault) for part in _of(p.made)]
    places += [(f"{name}'s disk", part) for name, disk in world.disks.items() for part in disk.contents()]
    for name, (what, data) in ((name, part if isinstance(part, tuple) else ("file", part)) for name, part in places):
        for run, text in runs.items():
            if run in data:
                yield f"{name}: {what} of {text[:24]!r}, which was deleted"
                break


def _of_worker(worker: FakeWorker) -> Iterator[tuple[str, bytes]]:
    engine = worker.thread.engine
    for what, pool in (("device", engine.pool), ("host", engine.tiers.host.pool)):
        yield from ((what, pack_ids(pool.index[block].ids)) for block in pool.index.blocks())


def _of(vault: Vault) -> Iterator[tuple[str, bytes]]:
    table = vault.store.table
    headers = [*(entry.header for entry in table.resident.values()), *table.on_disk.values()]
    yield from (("block", header.ids) for header in headers)
