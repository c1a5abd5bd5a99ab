"""Frames that a worker streams to the inbox of a request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvproto.messages.chats import AssistantDelta, AssistantMessage
from kvproto.messages.vocabulary import Count, FinishReason, Name, Seconds, Text, Tokens32


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker has the request: from here on it sends exactly one terminal frame."""

    request: Name
    attempt: Count
    worker: Name
    epoch: Name


@dataclass(frozen=True, slots=True)
class Started:
    """Sent once, before the first tokens. `cached` counts the prompt tokens that were found, per tier."""

    request: Name
    attempt: Count
    worker: Name
    prompt_tokens: Count
    cached: dict[str, int]
    queue_s: Seconds = 0.0
    recomputed_tokens: Count = 0  # tokens of an earlier attempt that are computed again

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities: the token's own, and the most probable ones, best first. `rank`:
    how many tokens are as probable at least, itself included; 0: not told, as of generated tokens."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: Count = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of the prompt's tokens `index` ... `index + len(logprobs) - 1`; the first token, 0, has none. They come in order,
    all before the first generated token."""

    request: Name
    attempt: Count
    index: Count
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens `index` ... `index + len(ids) - 1` of one choice, one piece of text per id.

    A piece is empty while a character or a stop string may be incomplete; together they are exactly the final text.
    `logprobs` has one entry per id, or none unless the request asked for them; so have `deltas`, for a chat.
    """

    request: str
    attempt: int
    choice: int
    index: int
    ids: Tokens32
    text: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    deltas: tuple[AssistantDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class StopToken:
    """That ended a choice whose tokens have log probabilities. It is neither emitted nor counted."""

    id: Count
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """Not terminal: one of several choices has ended. Sent for each before `Finished`, only where n > 1."""

    request: Name
    attempt: Count
    choice: Count
    reason: FinishReason
    output_tokens: Count  # of this choice, those of earlier attempts included
    stop: Text = ""  # the stop string that ended it; "": something else did
    stop_token: StopToken | None = None
    message: AssistantMessage | None = None  # of a chat


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal. `output_tokens` counts the generated tokens of all choices and attempts; `reason` and `message` are
    choice 0's."""

    request: Name
    attempt: Count
    reason: FinishReason
    prompt_tokens: Count
    output_tokens: Count
    cached_tokens: Count = 0
    worker: Name = ""
    stop: Text = ""  # the stop string that ended choice 0; "": something else did
    stop_token: StopToken | None = None  # of choice 0
    message: AssistantMessage | None = None  # of a chat


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal. `retryable`: the same request may succeed elsewhere."""

    request: Name
    attempt: Count
    code: Name
    message: Text
    retryable: bool = False
    field: Name | None = None
    output_tokens: Count = 0
    retry_after_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """Terminal for this attempt: the worker gives up the sequence; go on elsewhere after `output_tokens`."""

    request: Name
    attempt: Count
    output_tokens: Count
    to: Name | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Answer to ResendRequest: the worker lives and has generated `next_index` tokens, of all choices together."""

    request: Name
    attempt: Count
    next_index: Count
    step_age_s: Seconds = 0.0  # how long the engine has been in its present step


Frame = Accepted | Started | PromptScores | Tokens | ChoiceFinished | Finished | Failed | Moved | Progress
TERMINAL = (Finished, Failed, Moved)
