"""What a request is to its run, once it was read and tokenised. Pure: the stream, the turn and the form are others'."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfleet.ingress.limits.run_memory import STREAMED, TokenCosts
from kvfleet.ingress.limits.service_levels import ServiceLevel
from kvfleet.ingress.runs.event_writer import Form
from kvfleet.ingress.runs.transcript import Transcript
from kvproto.client import Generation
from kvproto.messages import Continuation
from kvproto.streams.stream import Event

PROMPT_TOKEN_BYTES = 48
BIAS_BYTES = 96


class TokenStream(Protocol):
    """The part of `kvproto.Stream` that is needed here."""

    @property
    def worker(self) -> str | None: ...
    @property
    def accepted(self) -> bool: ...
    async def read(self) -> list[Event]: ...
    async def cancel(self, received: Sequence[int] | None = None) -> None: ...


class HeldTurn(Protocol):
    """What a request holds while it runs, and what is kept when it has ended."""

    async def open(self) -> None:
        """Before the stream starts, each time. Raises KvfleetError."""

    async def commit(self, transcript: Transcript) -> None:
        """The stream has finished. Raises KvfleetError."""

    async def abandon(self, transcript: Transcript) -> None:
        """The stream was cut. Never raises."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was read and tokenised: all that is left is to run it. `form` is how its answer is written,
    `turn_bytes` the memory that its turn keeps besides the prompt's ids, `level` where the gaps between its tokens are
    counted, `costs` what each of its tokens takes."""

    generation: Generation
    form: Form
    turn: HeldTurn
    turn_bytes: int = 0
    level: ServiceLevel | None = None
    costs: TokenCosts = STREAMED

    @property
    def size(self) -> int:
        """Bytes of memory, about, without the form's."""
        said, ids = self.generation.sampling, len(self.generation.prompt_ids)
        asked = sum(map(len, said.stop)) + BIAS_BYTES * (len(said.logit_bias) + len(said.stop_ids))
        return self.turn_bytes + PROMPT_TOKEN_BYTES * ids + asked


Prepare = Callable[[], Awaitable[Job]]
Start = Callable[[Generation, Sequence[Continuation]], TokenStream]
