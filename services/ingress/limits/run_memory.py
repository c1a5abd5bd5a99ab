"""What running requests hold of the process's memory, and which of them ends when it is used up. Pure.

    used <= half   all grow, new ones are let in
    used > half    none is let in; a run that holds more than an even share of the half, and would grow, ends

So the runs that are beyond their share do not grow, those below reach it at most, and no more than the whole is used.
Costs are what CPython takes, measured by a test: an answer that is sent whole is built of its transcript at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproto.errors import PayloadTooLarge, Unavailable
from kvproto.messages import Sampling

DEFAULT_BYTES = 384 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Bytes of memory for each token, for its log probability, and for each alternative to it."""

    token: int
    logprobs: int
    alternative: int

    def of(self, tokens: int, alternatives: int | None) -> int:
        """`alternatives` None: no log probabilities."""
        scored = self.logprobs + self.alternative * alternatives if alternatives is not None else 0
        return tokens * (self.token + scored)


STREAMED = TokenCosts(128, 256, 72)
WHOLE = TokenCosts(192, 1024, 448)  # with the answer's JSON and what it is made of


@dataclass(slots=True)
class RunMemory:
    """Owned by the event loop. A holder adds what it grows by, and gives back all of it."""

    limit: int = DEFAULT_BYTES
    used: int = 0
    holders: int = 0

    @property
    def half(self) -> int:
        return self.limit // 2

    def check_room(self) -> None:
        """Raises Unavailable where one more request would have to wait for others to end."""
        if self.used > self.half:
            raise Unavailable("running answers have used up their memory", retry_after_s=1.0)

    def check_longest(self, sampling: Sampling, costs: TokenCosts, field: str) -> None:
        """Raises PayloadTooLarge for a request whose longest answer no waiting makes room for."""
        longest = costs.of(sampling.n * sampling.max_tokens, sampling.logprobs)
        if longest > self.half:
            raise PayloadTooLarge(
                f"n * {field} is {sampling.n * sampling.max_tokens} tokens, which may take {megabytes(longest)} with "
                f"what is asked of each; one answer may take {megabytes(self.half)}",
                field=field,
            )

    def check_share(self, held: int) -> None:
        """Raises PayloadTooLarge for a run that must not grow beyond what it holds."""
        if self.used > self.half and held * self.holders > self.half:
            raise PayloadTooLarge(
                f"running answers have used up their memory, and this one has more than its share: {megabytes(held)}. "
                "Ask for fewer choices, tokens or log probabilities"
            )


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
