"""The names under which a worker takes requests, and the roots of each one's blocks: its model, and adapters of that,
which come and go. Pure; owned by the worker's event loop."""

from __future__ import annotations

from collections.abc import Iterable

from kvproto.block_hash import Root, TenantRoots
from kvproto.errors import ModelNotFound, Unavailable
from kvproto.messages import Adapter, WorkerRecord


class ServedModels:
    """What was unloaded is still known: its blocks may be here, and sequences that have them."""

    def __init__(self, record: WorkerRecord, fleet_key: bytes) -> None:
        self.model = record.model
        self._record, self._key = record, fleet_key
        self._loaded: frozenset[str] = frozenset()
        self._roots = {record.model: [self._roots_of("")]}  # by name: of all that had it, the last one is it now
        self._loras: dict[str, str] = {}
        self.put(record.adapters)

    def put(self, adapters: Iterable[Adapter]) -> None:
        """These are loaded now, and no others."""
        listed = tuple(adapters)
        self._loaded = frozenset(one.name for one in listed)
        for one in listed:
            if self._loras.get(one.name) != one.lora:
                self._loras[one.name] = one.lora
                self._roots.setdefault(one.name, []).append(self._roots_of(one.lora))

    def check(self, name: str, *, new: bool) -> None:
        """`new`: nothing runs of the request yet. Raises ModelNotFound, or Unavailable for what others may have."""
        if name not in self._roots:
            raise ModelNotFound(f"this worker serves {self.model!r}, not {name!r}", field="model")
        if new and name != self.model and name not in self._loaded:
            raise Unavailable(f"this worker has {name!r} no longer", field="model")

    def adapter(self, name: str) -> str:
        """ "" for the model itself."""
        return "" if name == self.model else name

    def root(self, name: str, tenant: str, ids: tuple[int, ...]) -> Root:
        """Of a name that passed the check."""
        return self._roots[name][-1].of(tenant, ids)

    def all_roots(self, name: str, tenant: str, ids: tuple[int, ...]) -> list[Root]:
        """Of all that ever had the name here, the present one last; "" is the model's. None for an unknown one."""
        return [roots.of(tenant, ids) for roots in self._roots.get(name or self.model, ())]

    def _roots_of(self, lora: str) -> TenantRoots:
        me = self._record
        return TenantRoots(me.model_revision, me.block_size, me.public_prefixes, self._key, lora)
