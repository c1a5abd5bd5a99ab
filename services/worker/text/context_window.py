"""Which of a sequence's tokens the model sees when they are more than its context holds. Pure arithmetic.

    error                refused
    truncate_left        prompt [dropped|............] + max_tokens = context
    truncate_generation  prompt [....................] + what is left of the context
    sliding              the older half goes whenever the context is full, positions count from 0 again:

        tokens  0        h        C       C+h      C+2h          C context, h = C // 2
        seen    [=================)
                         [=================)
                                  [=================)

It depends on the lengths of prompt and outputs alone, so a worker that continues a request sees the same tokens at the
same positions and generates the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproto.errors import ContextLengthExceeded
from kvproto.messages import Overflow


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """`dropped` prompt tokens are never seen; fewer than `limit` tokens are seen at once."""

    dropped: int
    max_tokens: int
    limit: int | None = None

    def start(self, total: int) -> int:
        """How many of `total` tokens, prompt and outputs, the model no longer sees."""
        if self.limit is None or total < self.limit:
            return self.dropped
        half = self.limit // 2
        return (1 + (total - self.limit) // half) * half

    @classmethod
    def of(cls, prompt: int, max_tokens: int, context: int, overflow: Overflow) -> ContextWindow:
        """Raises ContextLengthExceeded where the policy does not make the request fit."""
        if overflow is Overflow.SLIDING:
            if context < 2:
                raise ContextLengthExceeded(f"a context of {context} cannot slide", field="overflow")
            return cls(0, max_tokens, context)
        if overflow is Overflow.TRUNCATE_LEFT:
            if max_tokens >= context:
                raise ContextLengthExceeded(
                    f"{max_tokens} leaves no room for a prompt in the context of {context}", field="max_tokens"
                )
            return cls(max(0, prompt + max_tokens - context), max_tokens)
        room = context - prompt
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens, the context of {context} tokens leaves room for at most "
                f"{context - 1}",
                field="prompt_ids",
            )
        if overflow is Overflow.TRUNCATE_GENERATION:
            return cls(0, min(max_tokens, room))
        if max_tokens > room:
            raise ContextLengthExceeded(
                f"{max_tokens} is more than the {room} tokens that the context of {context} leaves after a prompt of "
                f"{prompt}",
                field="max_tokens",
            )
        return cls(0, max_tokens)
