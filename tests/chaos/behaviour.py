"""How a client behaves beside asking: reads slowly, leaves for good, breaks its own connection. Plain values."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Behaviour:
    """`leaves_after`, `cuts_after`: so many tokens or events; None: never. `whole`: HTTP that does not stream."""

    name: str = "plain"
    leaves_after: int | None = None
    cuts_after: int | None = None
    pause_s: float = 0.0
    whole: bool = False
    repeats: bool = False  # asks a second time under the same key, while the first runs

    @classmethod
    def draw(cls, chance: random.Random, *, is_http: bool, is_plain: bool) -> Behaviour:
        """Half of all clients are plain."""
        if is_plain or chance.random() < 0.5:
            return cls()
        choices = [cls("leaves", leaves_after=chance.randint(1, 40)), cls("reads slowly", pause_s=0.15)]
        if is_http:
            choices += [
                cls("does not stream", whole=True),
                cls("loses its connection", cuts_after=chance.randint(1, 30)),
                cls("asks twice", repeats=True),
            ]
        return chance.choice(choices)

    async def pause(self) -> None:
        if self.pause_s:
            await asyncio.sleep(self.pause_s)


PLAIN = Behaviour()
