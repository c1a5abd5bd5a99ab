"""What a vLLM worker's engine knows of the tiers below it, and those of a worker that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.port.engine_port import Hashed, TierPort
from kvfleet.worker.port.sequence_spec import Locate
from kvfleet.worker.vllm.vllm_sequence import VllmSequence
from kvfleet_vllm.wire import BlocksRead, BlocksSaved, BlocksSaving, StateSaving
from kvproto.block_hash import Root
from kvproto.messages import GenerateRequest, HotChain, Tier, TierLoad

MoveNews = BlocksSaving | StateSaving | BlocksSaved | BlocksRead


class StoreTiers(TierPort, Protocol):
    """Tiers that vLLM's connector reads and writes; `name` is vLLM's of a request."""

    async def prepare(self, sequence: VllmSequence) -> Mapping[str, Any]:
        """What vLLM is told of the store with the request that is about to be sent."""
        ...

    def restored(self, name: str, tokens: int) -> dict[Tier, int]:
        """Of the tokens that vLLM restores for a request, how many came from which tier."""
        ...

    def over(self, name: str) -> None:
        """A request has left vLLM, or never came there."""
        ...

    def away(self) -> None:
        """vLLM is gone."""
        ...

    def back(self) -> None:
        """vLLM, or another process of it, is there again, and has served a request."""
        ...

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Have vaults keep a chain, as far as it is here."""
        ...

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int) -> int:
        """Returns how many blocks went."""
        ...

    def on_move(self, told: MoveNews) -> None: ...

    def holdings(self) -> dict[Tier, list[bytes]]: ...

    def depths(self, hashes: Sequence[bytes]) -> dict[Tier, int]:
        """How many leading blocks of a chain are in each tier."""
        ...

    @property
    def digest(self) -> int: ...

    def loads(self) -> dict[str, TierLoad]: ...


class NoTiers(StoreTiers):
    async def prepare(self, sequence: VllmSequence) -> Mapping[str, Any]:
        return {}

    def restored(self, name: str, tokens: int) -> dict[Tier, int]:
        return {}

    def over(self, name: str) -> None: ...

    def away(self) -> None: ...

    def back(self) -> None: ...

    def keep(self, hashes: Sequence[bytes]) -> None: ...

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int) -> int:
        return 0

    def on_move(self, told: MoveNews) -> None: ...

    def holdings(self) -> dict[Tier, list[bytes]]:
        return {}

    def depths(self, hashes: Sequence[bytes]) -> dict[Tier, int]:
        return {}

    @property
    def digest(self) -> int:
        return 0

    def loads(self) -> dict[str, TierLoad]:
        return {}

    @property
    def lends(self) -> bool:
        return False

    @property
    def is_lending(self) -> bool:
        return False

    def meet(self, worker: str) -> None:
        return None

    def would_look(self, request: GenerateRequest, tokens: int) -> bool:
        return False

    def hash(self, request: GenerateRequest, root: Root, ids: tuple[int, ...]) -> Hashed:
        return {}

    def locate(
        self, request: GenerateRequest, root: Root, ids: tuple[int, ...], hashed: Hashed, traceparent: str
    ) -> Locate:
        return lambda choice: None

    async def in_vaults(self, root: Root, ids: Sequence[int]) -> int:
        return 0

    async def at_peer(self, names: Sequence[BlockName], peer: str, limit_s: float) -> int:
        return 0

    async def rates(self) -> Mapping[str, float]:
        return {}

    async def preload(self, chain: HotChain, limit_s: float) -> None: ...

    async def offer(self, chains: Sequence[HotChain]) -> None: ...

    async def settled(self) -> None: ...
