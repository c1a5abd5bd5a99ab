"""Loop: the LoRA adapters that a vLLM server has, loaded and unloaded at run time. Owned by the worker's event loop.

    found: what vLLM lists when it is there ──▶ loaded ◀──load, unload── admin
              └─ it was restarted: what was loaded at run time is loaded again

An adapter's revision is a digest of its files, where the worker can read them too: so its blocks are found wherever the
same ones are loaded. Otherwise it is drawn, and its blocks are this server's alone, for as long as it lives. vLLM reads
the files again when it has dropped an adapter for others, so those of a loaded one must neither change nor go: it ends
where they are gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfleet.worker.port.engine_port import AdapterPort
from kvfleet.worker.vllm.token_routes import Answered, TokenRoutes
from kvproto.errors import InvalidRequest, KvfleetError, NotFound
from kvproto.ids import base32
from kvproto.messages import Adapter
from kvservice.lora_folder import LoraFolder

log = logging.getLogger(__name__)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MOST = 256  # that a record names
REVISION_BYTES = 16
_OF_WORKER = re.compile(r"Worker failed with error '(.*)', please check the stack trace")


@dataclass(eq=False)
class VllmAdapters(AdapterPort):
    """`model` is its config.json, where that is known."""

    routes: TokenRoutes
    model: Mapping[str, Any] = field(default_factory=dict)
    loaded: tuple[Adapter, ...] = ()
    is_enabled: bool = False
    _asked: dict[str, str] = field(default_factory=dict)  # paths of what was loaded at run time
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def found(self, listed: Mapping[str, str], *, is_enabled: bool, anew: bool) -> None:
        """vLLM is there, and lists these names and paths. `anew`: it is another process than before."""
        async with self._changing:
            self.is_enabled = is_enabled
            known = {} if anew else {one.name: one for one in self.loaded}
            self.loaded = tuple(
                [known.get(name) or await _adapter(name, path) for name, path in [*listed.items()][:MOST]]
            )
            for name, path in [*self._asked.items()]:
                if name not in listed:
                    try:
                        await self._load(name, path)
                    except KvfleetError as error:
                        log.warning("the adapter %s is not loaded any more: %s", name, error)

    async def load(self, name: str, path: str) -> None:
        async with self._changing:
            await self._load(name, path)

    async def unload(self, name: str) -> None:
        async with self._changing:
            if all(one.name != name for one in self.loaded):
                raise NotFound(f"no adapter {name!r} is loaded", field="model")
            try:
                await self._order(UNLOAD, {"lora_name": name})
            except InvalidRequest as error:
                log.info("vLLM had not loaded the adapter %s: %s", name, error)
            self._asked.pop(name, None)
            self.loaded = tuple(one for one in self.loaded if one.name != name)

    async def _load(self, name: str, path: str) -> None:
        if not self.is_enabled:
            raise InvalidRequest("vLLM was started without --enable-lora")
        if not name or not path:
            raise InvalidRequest("an adapter has a name and a path", field="model")
        if any(one.name == name for one in self.loaded):
            raise InvalidRequest(f"{name!r} is loaded already: unload it first", field="model")
        if len(self.loaded) >= MOST:
            raise InvalidRequest(f"at most {MOST} adapters", field="model")
        adapter = await _adapter(name, path, self.model)
        await self._order(LOAD, {"lora_name": name, "lora_path": path})
        self._asked[name] = path
        self.loaded = (*self.loaded, adapter)

    async def _order(self, route: str, body: Mapping[str, str]) -> None:
        try:
            await self.routes.order(route, body)
        except Answered as error:
            if error.status == 404 and "Not Found" in error.said:  # FastAPI's own, for a route that is not there
                raise InvalidRequest(
                    "vLLM was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
                ) from None
            deeper = _OF_WORKER.search(error.said)
            raise InvalidRequest(f"vLLM refuses it: {deeper[1] if deeper else error.said}", field="path") from None


async def _adapter(name: str, path: str, model: Mapping[str, Any] | None = None) -> Adapter:
    """Raises InvalidRequest for one that does not fit the `model`, if that is given. A relative path is another folder
    here than it is for vLLM, if it is one and not the name of one at a hub."""

    def read() -> str | None:
        if not (os.path.isabs(path) and os.path.isdir(path)):
            return None
        folder = LoraFolder.read(Path(path))
        folder.check_fits(model or {})
        return folder.revision()

    revision = None
    try:
        revision = await asyncio.to_thread(read)
    except (InvalidRequest, OSError) as error:
        if model is not None:
            raise InvalidRequest(str(error), field="path") from None
        log.warning("the adapter %s shares no blocks with other workers: %s", name, error)
    return Adapter(name, revision or base32(os.urandom(REVISION_BYTES)))
