"""A script for the interpreter that has vLLM: its TieringOffloadingSpec, manager and host memory, over ordinary memory,
with our tier below. Only the copies between device and host are missing. `python tier_trial.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvfleet_vllm.cache_groups import CacheGroups
from kvfleet_vllm.tier_side import SIDES, TierSide
from kvfleet_vllm.wire import (
    VERSION,
    BlocksErased,
    BlocksRead,
    BlocksSaved,
    BlocksSaving,
    EngineHello,
    EraseBlocks,
    GrantSlots,
)
from tests.support.tier_sidecar import TOKENS, TierSidecar, step_of

BYTES = 2 * 4096
CHUNKS, SLOTS = 6, 16
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
NO_ONE = ScheduleEndContext((), ())


class Engine:
    """vLLM's scheduler as far as offloading goes: what its connectors do there, in the order of MultiConnector."""

    def __init__(self, folder: Path, name: str, extra: dict[str, Any] | None = None, known: bool = True) -> None:
        self.sidecar = TierSidecar(folder, SLOTS, BYTES)
        self.fillings = 0
        self.engine = f"kvfleet-{os.getpid()}-{name}"
        self.side = TierSide(lambda: EngineHello(VERSION, name, 1, "0", {}), groups=CacheGroups(TOKENS))
        self.side.pool = SimpleNamespace(blocks=[], evict_blocks=lambda blocks: None)
        self.side.formats = {0: b"f"}
        if known:
            SIDES[self.engine] = self.side
        tier = {"type": "KvfleetTier", "module_path": "kvfleet_vllm.tier"}
        settings = {"cpu_bytes_to_use": CHUNKS * BYTES, "secondary_tiers": [tier], **(extra or {})}
        self.spec = TieringOffloadingSpec(config_of(self.engine, settings))
        self.manager: Any = self.spec.get_manager()
        self.memory = self.manager.primary_tier.get_kv_memoryview().cast("B")

    def close(self) -> None:
        self.side.close()
        self.memory.release()
        self.manager.shutdown()
        self.sidecar.close()

    def begin(self, name: str, keys: Sequence[Any], **wanted: Any) -> ReqContext:
        request = self.sidecar.request(name, len(keys) * TOKENS + 1, **wanted)
        self.side.request_added(request)
        context = ReqContext(request.request_id, request.kv_transfer_params)
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * TOKENS)
        self.policy: RequestOffloadingContext = self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.side.step(step_of())
        self.manager.on_schedule_end(NO_ONE)

    def settle(self) -> None:
        """Steps as vLLM makes them while its tiers have work."""
        until = time.monotonic() + 20
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < until
            self.step()

    def look(self, keys: Sequence[Any], context: ReqContext) -> list[LookupResult]:
        """For the leading ones, as vLLM does."""
        found = []
        for key in keys:
            found.append(self.manager.lookup(key, context))
            if found[-1] is MISS:
                break
        return found

    def store(self, keys: Sequence[Any], context: ReqContext, values: Sequence[bytes]) -> int:
        """The workers have written these to vLLM's host memory. Returns how many were not there."""
        output = self.manager.prepare_store(keys, context)
        by_key = dict(zip(keys, values, strict=True))
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.memory[int(chunk) * BYTES :][:BYTES] = by_key[key]
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)  # vLLM's own are sets
        return len(output.keys_to_store)

    def read(self, keys: Sequence[Any], context: ReqContext) -> list[bytes]:
        """What the workers would bring to the device."""
        chunks = self.manager.prepare_load(keys, context).chunk_ids
        found = [bytes(self.memory[int(chunk) * BYTES :][:BYTES]) for chunk in chunks]
        self.manager.complete_load(keys, context)
        return found

    def finish(self, context: ReqContext) -> None:
        self.side.request_finished(context.req_id)
        self.manager.on_request_finished(context)

    def fill_host(self) -> None:
        """Another request's blocks take all of vLLM's host memory."""
        keys = keys_of(f"filling {self.fillings}", CHUNKS)
        context = self.begin(f"filling {self.fillings}", keys)
        self.fillings += 1
        assert self.store(keys, context, [bytes(BYTES)] * CHUNKS) == CHUNKS
        self.finish(context)
        self.settle()

    def free_chunks(self) -> int:
        primary = self.manager.primary_tier
        free: int = primary._get_num_free_chunks() + primary._num_evictable_cache_chunks
        return free


def config_of(engine: str, extra: dict[str, Any]) -> OffloadingConfig:
    blocks = extra.get("blocks_per_chunk", 1)
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=BYTES,
        enable_kv_cache_events=True,
        extra_config=extra,
        engine_id=engine,
        model=OffloadingModelConfig("m", "float32"),
        cache=OffloadingCacheConfig(TOKENS, blocks),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )


def keys_of(name: str, count: int) -> list[Any]:
    return [make_offload_key(b"%24s%8d" % (name.encode(), number), 0) for number in range(count)]


def saved(engine: Engine, keys: Sequence[Any], values: Sequence[bytes], slots: Sequence[int]) -> None:
    """A conversation whose blocks vLLM has stored and the tier has saved."""
    context = engine.begin("first", keys, save_from=0)
    assert engine.policy.policy is OffloadPolicy.REQUEST_LEVEL
    assert len(engine.sidecar.heard()) == 2
    engine.sidecar.say(GrantSlots(tuple(slots)))
    engine.step()
    assert engine.look(keys, context) == [MISS]
    assert engine.store(keys[:2], context, values[:2]) == 2  # a prompt in two steps
    assert engine.store(keys[2:], context, values[2:]) == len(keys) - 2
    engine.side.request_finished(context.req_id)
    engine.manager.on_request_finished(context)
    engine.settle()
    told = engine.sidecar.heard()
    assert [one.at for one in told if isinstance(one, BlocksSaving)] == [0, 2]
    assert [slot for one in told if isinstance(one, BlocksSaved) for slot in one.slots] == list(slots[: len(keys)])
    assert [engine.sidecar.slot(slot) for slot in slots[: len(keys)]] == list(values)
    assert not engine.side.wants(context.req_id)


def there_and_back(engine: Engine) -> None:
    keys, values, slots = conversation(5)
    saved(engine, keys, values, slots)
    engine.fill_host()
    nobody = engine.begin("nobody", keys)
    assert engine.policy.policy is OffloadPolicy.CHUNK_LEVEL
    assert engine.look(keys, nobody) == [MISS]  # vLLM has lost them
    context = engine.begin("next", keys, slots=slots[:4], save_from=4)
    assert engine.look(keys, context) == [PENDING] * 4 + [MISS]
    engine.sidecar.heard()
    engine.settle()
    assert engine.sidecar.heard() == [BlocksRead("next", 4, 0.0)]
    assert engine.look(keys, context) == [HIT] * 4 + [MISS]
    assert engine.read(keys[:4], context) == values[:4]
    assert engine.look(keys, engine.begin("other", keys)) == [HIT] * 4 + [MISS]  # vLLM's own from now on
    engine.finish(context)


def what_only_vllm_has_is_saved(engine: Engine) -> None:
    keys, values, _ = conversation(5)
    engine.store(keys, engine.begin("first", keys), values)
    engine.settle()
    again = engine.begin("again", keys, save_from=1)
    engine.sidecar.heard()
    engine.sidecar.say(GrantSlots((0, 3, 5, 6, 8)))
    engine.step()
    assert engine.look(keys, again) == [HIT] * 5
    assert engine.store(keys, again, values) == 0
    engine.settle()
    assert engine.sidecar.heard() == [BlocksSaving("again", 1, (0, 3, 5, 6)), BlocksSaved("again", (0, 3, 5, 6))]
    assert [engine.sidecar.slot(slot) for slot in (0, 3, 5, 6)] == values[1:]


def a_load_that_fails_is_computed(engine: Engine) -> None:
    keys, values, slots = conversation(5)
    saved(engine, keys, values, slots)
    engine.fill_host()
    context = engine.begin("next", keys, slots=slots[:5], save_from=5)
    assert engine.look(keys, context) == [PENDING] * 5
    os.truncate(engine.sidecar.file, 100)
    engine.sidecar.heard()
    engine.settle()
    assert engine.sidecar.heard() == [BlocksRead("next", 0, 0.0)]
    assert engine.look(keys, context) == [MISS]
    assert engine.free_chunks() == CHUNKS
    assert engine.store(keys, context, values) == 5
    engine.settle()
    assert engine.read(keys, context) == values
    assert engine.sidecar.heard() == []  # nothing of it is saved
    engine.finish(context)


def a_worker_that_goes_during_a_load(engine: Engine) -> None:
    keys, values, slots = conversation(3)
    saved(engine, keys, values, slots)
    engine.fill_host()
    context = engine.begin("next", keys, slots=slots[:3], save_from=3)
    assert engine.look(keys, context) == [PENDING] * 3
    engine.manager.on_schedule_end(NO_ONE)
    engine.sidecar.hang_up()
    engine.side.drain()
    engine.settle()
    assert engine.look(keys, context) == [MISS]
    assert engine.free_chunks() == CHUNKS
    assert engine.store(keys, context, values) == 3
    engine.settle()
    assert engine.sidecar.heard() == []


def a_host_memory_that_is_full(engine: Engine) -> None:
    keys, values, slots = conversation(5)
    saved(engine, keys, values, slots)
    engine.fill_host()
    others = keys_of("filling 0", CHUNKS)[:4]
    pinned = ReqContext("pinned")
    engine.manager.prepare_load(others, pinned)
    context = engine.begin("next", keys, slots=slots[:5], save_from=5)
    assert engine.look(keys, context) == [PENDING, PENDING, MISS]
    engine.sidecar.heard()
    engine.settle()
    assert engine.sidecar.heard() == [BlocksRead("next", 2, 0.0)]
    engine.manager.complete_load(others, pinned)
    assert engine.look(keys, context) == [HIT, HIT, MISS]  # the other slots are free since
    assert engine.read(keys[:2], context) == values[:2]


def a_preempted_request_is_brought_nothing_twice(engine: Engine) -> None:
    keys, values, slots = conversation(4)
    saved(engine, keys, values, slots)
    engine.fill_host()
    engine.sidecar.heard()
    context = engine.begin("next", keys, slots=slots[:3], save_from=3)
    engine.look(keys, context)
    engine.settle()
    engine.sidecar.say(GrantSlots((10, 11, 12)))
    engine.step()
    assert engine.store(keys, context, values) == 1
    engine.settle()
    assert engine.sidecar.heard() == [
        BlocksRead("next", 3, 0.0), BlocksSaving("next", 3, slots[4:5]), BlocksSaved("next", slots[4:5]),
    ]  # fmt: skip
    engine.manager.on_schedule_end(ScheduleEndContext((), (context.req_id,)))
    engine.fill_host()
    for slot in slots[:3]:  # others have them by now
        with engine.sidecar.file.open("r+b") as file:
            file.seek(slot * BYTES)
            file.write(bytes(BYTES))
    assert engine.look(keys, context) == [MISS]
    assert engine.store(keys, context, values) == 4
    engine.settle()
    assert engine.read(keys, context) == values
    assert engine.sidecar.heard() == []
    engine.finish(context)


def a_request_that_is_aborted_while_it_loads(engine: Engine) -> None:
    keys, values, slots = conversation(3)
    saved(engine, keys, values, slots)
    engine.fill_host()
    context = engine.begin("next", keys, slots=slots[:3])
    engine.look(keys, context)
    engine.sidecar.heard()
    engine.manager.on_schedule_end(NO_ONE)
    engine.finish(context)
    engine.settle()
    assert engine.sidecar.heard() == [BlocksRead("next", 3, 0.0)]
    assert engine.free_chunks() == CHUNKS
    later = engine.begin("later", keys)
    assert engine.look(keys, later) == [HIT] * 3
    assert engine.read(keys, later) == values


def an_order_to_erase_empties_host_memory(engine: Engine) -> None:
    keys, values, _ = conversation(4)
    context = engine.begin("first", keys)
    engine.store(keys, context, values)
    engine.settle()
    engine.manager.prepare_load(keys[:1], context)
    engine.sidecar.heard()
    engine.sidecar.say(EraseBlocks(1, ()))
    later = engine.begin("later", keys)
    assert engine.sidecar.heard() == [BlocksErased(1, 0)]
    assert engine.look(keys, later) == [HIT, MISS]  # but for what is in use
    engine.manager.complete_load(keys[:1], context)
    assert engine.free_chunks() == CHUNKS
    engine.fill_host()


def a_reset_waits_for_copies(engine: Engine) -> None:
    keys, values, slots = conversation(3)
    saved(engine, keys, values, slots)
    engine.fill_host()
    context = engine.begin("next", keys, slots=slots[:3])
    engine.look(keys, context)
    engine.manager.on_schedule_end(NO_ONE)
    engine.manager.reset_cache()
    assert not engine.manager.has_pending_work()
    assert engine.look(keys, context) == [MISS]


def another_configuration_is_refused(engine: Engine) -> None:
    for name, extra, known, words in (
        ("alone", {}, False, "before the OffloadingConnector"),
        ("large", {"blocks_per_chunk": 2, "cpu_bytes_to_use": CHUNKS * 2 * BYTES}, True, "chunks of one block"),
    ):
        folder = Path(engine.sidecar.path).parent / name
        folder.mkdir()
        refused = ""
        try:
            Engine(folder, name, extra, known)
        except ValueError as error:
            refused = str(error)
        assert words in refused


def conversation(count: int) -> tuple[list[Any], list[bytes], tuple[int, ...]]:
    """Keys, contents, and slots, one more."""
    return keys_of("a", count), [os.urandom(BYTES) for _ in range(count)], (7, 1, 13, 4, 9, 2)[: count + 1]


TRIALS = (
    there_and_back, what_only_vllm_has_is_saved, a_load_that_fails_is_computed, a_worker_that_goes_during_a_load,
    a_host_memory_that_is_full, a_preempted_request_is_brought_nothing_twice, a_request_that_is_aborted_while_it_loads,
    an_order_to_erase_empties_host_memory, a_reset_waits_for_copies, another_configuration_is_refused,
)  # fmt: skip


def main() -> None:
    """Prints what became of each trial: "" or how it failed."""
    told = {}
    for trial in TRIALS:
        folder = Path(sys.argv[1]) / trial.__name__
        folder.mkdir()
        try:
            with closing(Engine(folder, trial.__name__)) as engine:
                trial(engine)
            told[trial.__name__] = ""
        except Exception:  # noqa: BLE001
            told[trial.__name__] = traceback.format_exc()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
