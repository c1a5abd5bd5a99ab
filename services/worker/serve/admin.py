"""Loop: answers on a worker's admin and blocks subjects; questions about blocks run on the engine thread.

A long answer is fetched part by part, and kept so that all parts are of one answer. Many token ids come ahead:

    ids 0 ... ── ids 262,144 ... ── the question, without ids ── (its next parts)
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvfleet.worker.serve.worker_parts import WorkerParts
from kvproto import codec
from kvproto.block_hash import Root
from kvproto.connection import Message
from kvproto.errors import InvalidRequest, KvfleetError, NotFound, PayloadTooLarge, PermissionDenied
from kvproto.ids import DEFAULT_TENANT, is_token
from kvproto.messages import AdminCommand, AdminReply, AdminRequest, Inspection, SnapshotRequest, Tier, WorkerStats
from kvproto.subjects import is_inbox

log = logging.getLogger(__name__)

PART_BYTES = 768 * 1024
KEEP_S = 15.0  # answers, and ids of unfinished questions
MAX_KEPT = 8  # of each
MAX_IDS = 4_194_304  # as many as any message may have
REGION_COMMANDS = (AdminCommand.BUNDLE, AdminCommand.STATS, AdminCommand.ERASE)  # open to other regions


class LongAdminQuestions:
    """Token ids that came ahead of their question. The oldest question gives way."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, array[int]]] = {}  # with the time of the last part; oldest first

    def ids_of(self, request: AdminRequest, now: float) -> tuple[int, ...] | None:
        """All ids of a question; None while more follow. Raises InvalidRequest or PayloadTooLarge."""
        if not request.question:
            return request.ids
        self._kept = {name: kept for name, kept in self._kept.items() if now - kept[0] < KEEP_S}
        _, known = self._kept.pop(request.question, (now, array("I")))
        if len(known) != request.ids_before:
            raise InvalidRequest(f"{len(known)} ids of this question are known, not these", field="ids_before")
        if len(known) + len(request.ids) > MAX_IDS:
            raise PayloadTooLarge(f"at most {MAX_IDS} ids", field="ids")
        known.extend(request.ids)
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[request.question] = (now, known)
        return None if request.more_ids else tuple(known)


@dataclass(eq=False)
class AdminDesk:
    """Each question is answered in a task of its own; callbacks never wait."""

    parts: WorkerParts
    stats: Callable[[], WorkerStats]
    begin_drain: Callable[[], None]
    tell_adapters: Callable[[], Awaitable[None]]  # to all, and returns when they are told
    _kept: dict[str, tuple[float, bytes]] = field(default_factory=dict)
    _long_questions: LongAdminQuestions = field(default_factory=LongAdminQuestions)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._bundle = codec.encode(self.parts.bundle)

    async def on_admin(self, message: Message, among: Collection[AdminCommand] = tuple(AdminCommand)) -> None:
        if is_inbox(message.reply):
            self._spawn(self._answer(message, among))

    async def on_snapshot(self, message: Message) -> None:
        if is_inbox(message.reply):
            self._spawn(self._snapshot(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Message, among: Collection[AdminCommand]) -> None:
        try:
            request = codec.decode(AdminRequest, message.data)
            if request.command not in among:
                raise PermissionDenied(f"{request.command.value} is not for other regions", field="command")
            data = await self._data(request)
            parts = max(1, -(-len(data) // PART_BYTES))
            if request.part >= parts:
                raise InvalidRequest(f"the answer has {parts} parts", field="part")
            start = request.part * PART_BYTES
            digest = hashlib.blake2b(data, digest_size=8).hexdigest()
            reply = AdminReply(request.part, parts, data[start : start + PART_BYTES], digest)
        except KvfleetError as error:
            reply = AdminReply(code=error.code, message=str(error))
        await self._publish(message.reply, codec.encode(reply))

    async def _publish(self, subject: str, data: bytes) -> None:
        try:
            await self.parts.connection.publish(subject, data)
        except KvfleetError as error:
            log.debug("an answer was not sent: %s", error)

    async def _data(self, request: AdminRequest) -> bytes:
        if request.command is AdminCommand.BUNDLE:
            return self._bundle
        if request.command is AdminCommand.STATS:
            return codec.encode(self.stats())
        if request.command is AdminCommand.DRAIN:
            self.begin_drain()
            return b""
        if request.command in (AdminCommand.LOAD_ADAPTER, AdminCommand.UNLOAD_ADAPTER):
            await self._change_adapters(request)
            return b""
        tenant = request.tenant or DEFAULT_TENANT
        if not is_token(tenant):
            raise InvalidRequest("is no tenant", field="tenant")
        ids = self._long_questions.ids_of(request, asyncio.get_running_loop().time())
        if ids is None:
            return b""
        if request.command is AdminCommand.ERASE:
            await self._erase(request, tenant, ids)
            return b""
        self.parts.models.check(request.model or self.parts.models.model, new=False)
        root = self.parts.models.all_roots(request.model, tenant, ids)[-1]
        if request.command is AdminCommand.INSPECT:
            inspection = await self.parts.engine.inspect(root, ids)
            return codec.encode(await self._with_vaults(inspection, root, ids))
        return await self._kv(replace(request, ids=ids), tenant, root)

    async def _change_adapters(self, request: AdminRequest) -> None:
        adapters = self.parts.adapters
        if adapters is None:
            raise InvalidRequest(f"the {self.parts.record.engine} engine has no adapters")
        if request.command is AdminCommand.LOAD_ADAPTER:
            await adapters.load(request.model, request.path)
        else:
            await adapters.unload(request.model)
        await self.tell_adapters()

    async def _erase(self, request: AdminRequest, tenant: str, ids: tuple[int, ...]) -> None:
        """Each sequence is erased up to where others continue it, so the last one takes what they share."""

        async def erase(one: tuple[int, ...]) -> None:
            for root in self.parts.models.all_roots(request.model, tenant, one):
                await self.parts.engine.erase(root, one, request.keep)

        chains = [ids]
        for stray in request.strays:
            if stray.start > len(ids):
                raise InvalidRequest(f"begins behind {stray.start} ids, there are {len(ids)}", field="strays")
            chains.append(ids[: stray.start] + stray.ids)
        for one in chains:
            for longer in self.parts.frames.went_on(tenant, one):  # if the cancel comes late, or never
                await erase(longer)
            await erase(one)

    async def _with_vaults(self, inspection: Inspection, root: Root, ids: Sequence[int]) -> Inspection:
        """Adds what vaults have, if they answer in time."""
        in_vaults = await self.parts.tiers.in_vaults(root, ids) * self.parts.record.block_size
        if not in_vaults:
            return inspection
        held = max((*inspection.tiers.values(), in_vaults))
        return replace(inspection, tiers=inspection.tiers | {Tier.VAULT.value: held})

    async def _kv(self, request: AdminRequest, tenant: str, root: Root) -> bytes:
        """One layer's K and V as safetensors, kept until its parts are fetched."""
        now = asyncio.get_running_loop().time()
        self._kept = {key: kept for key, kept in self._kept.items() if now - kept[0] < KEEP_S}
        ids = hashlib.blake2b(repr(request.ids).encode(), digest_size=16).hexdigest()
        key = f"{tenant}/{ids}/{request.layer}"
        if request.part and key in self._kept:
            return self._kept[key][1]
        try:
            k, v = await self.parts.engine.read_kv(root, request.ids, request.layer)
        except IndexError:
            raise NotFound(f"there is no layer {request.layer}", field="layer") from None
        data = await asyncio.get_running_loop().run_in_executor(None, _to_safetensors, k, v)
        if len(self._kept) < MAX_KEPT:
            self._kept[key] = (now, data)
        return data

    async def _snapshot(self, message: Message) -> None:
        try:
            asked = codec.decode(SnapshotRequest, message.data).tier
            parts = await self.parts.broadcast.snapshot(self.parts.engine, asked)
        except KvfleetError as error:
            log.debug("snapshot: %s", error)
            return
        for part in parts:
            await self._publish(message.reply, codec.encode(part))


def _to_safetensors(k: Any, v: Any) -> bytes:
    """`{"k", "v"}`, each `[tokens, kv_heads, head_dim]`, in the pool's dtype, from torch tensors or numpy arrays."""
    if type(k).__module__.startswith("torch"):
        from safetensors.torch import save

        return bytes(save({"k": k.contiguous(), "v": v.contiguous()}))
    import numpy
    from safetensors.numpy import save as save_arrays

    return bytes(save_arrays({"k": numpy.ascontiguousarray(k), "v": numpy.ascontiguousarray(v)}))
