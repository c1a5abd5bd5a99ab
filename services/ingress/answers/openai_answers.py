"""OpenAI's answers: the types of bodies and chunks, which `openapi` describes, and how parts are made of a transcript.
Pure. Clients ignore the additional `kvfleet` object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from kvfleet.ingress.answers.tool_calls import CallAnswer, CallDelta
from kvfleet.ingress.http.answer_types import Described, Natural
from kvfleet.ingress.prompts.tokenizer import TokenSpelling
from kvfleet.ingress.runs.event_ids import EVENT_ID
from kvfleet.ingress.runs.transcript import Transcript
from kvproto.codec import floored
from kvproto.messages import Finished, FinishReason, TokenLogprobs


class RankedToken(Described):
    token: str
    logprob: float
    bytes: list[Natural]


class ScoredToken(RankedToken):
    top_logprobs: list[RankedToken]


class ChatLogprobs(Described):
    content: list[ScoredToken]
    refusal: None


class CompletionLogprobs(Described):
    """`top_logprobs` always has the token itself; `text_offset` counts the choice's characters before each token. Of an
    echoed prompt's first token there is no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Natural]

    def then(self, other: CompletionLogprobs) -> CompletionLogprobs:
        return CompletionLogprobs(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


class RankedLogprob(Described):
    logprob: float
    rank: Natural
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]  # by token id; of the first token: None


def chat_logprobs(spelling: TokenSpelling, ids: Sequence[int], logprobs: Iterable[TokenLogprobs]) -> ChatLogprobs:
    text_of, bytes_of = spelling.text_of, spelling.bytes_of
    content = []
    for token, scores in zip(ids, map(floored, logprobs), strict=True):
        tops = zip(scores.top_ids, scores.top_logprobs, strict=True)
        top = [RankedToken(text_of(one), value, list(bytes_of(one))) for one, value in tops]
        content.append(ScoredToken(text_of(token), scores.logprob, list(bytes_of(token)), top))
    return ChatLogprobs(content, None)


def completion_logprobs(
    spelling: TokenSpelling,
    ids: Sequence[int],
    pieces: Sequence[str],
    logprobs: Iterable[TokenLogprobs],
    offset: int = 0,
) -> CompletionLogprobs:
    """`offset`: characters of the choice's text before these."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, piece, scores in zip(ids, pieces, map(floored, logprobs), strict=True):
        tokens.append(spelling.text_of(token))
        values.append(scores.logprob)
        ranked = zip(scores.top_ids, scores.top_logprobs, strict=True)
        tops.append({spelling.text_of(one): value for one, value in ranked} | {tokens[-1]: scores.logprob})
        offsets.append(offset)
        offset += len(piece)
    return CompletionLogprobs(tokens, values, tops, offsets)


class CachedTokens(Described):
    cached_tokens: Natural


class ReasoningTokens(Described):
    reasoning_tokens: Natural


class Usage(Described):
    prompt_tokens: Natural
    completion_tokens: Natural  # of all choices
    total_tokens: Natural
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class FleetNote(Described):
    request_id: str
    worker_id: str
    cached_tokens: Natural
    queue_s: float | None
    cached_by_tier: dict[str, Natural]


class BatchNote(Described):
    """Of an answer for several prompts: in their order, each one's request. `request_id` is the first one's."""

    request_id: str
    requests: list[FleetNote]


Reason = FinishReason | Literal["tool_calls"]


class AnswerMessage(Described):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallAnswer] = field(default_factory=list)
    reasoning_content: str | None = None


class ChatChoice(Described):
    index: Natural
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    token_ids: list[Natural] | None = None


class CompletionChoice(Described):
    index: Natural
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[Natural] | None = None
    token_ids: list[Natural] | None = None


class _Named(Described):
    id: str
    object: str
    created: Natural
    model: str
    system_fingerprint: str


class ChatAnswer(_Named):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    kvfleet: FleetNote
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[Natural] | None = None


class CompletionAnswer(_Named):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    kvfleet: FleetNote | BatchNote


# `openai_events` sends chunks as dicts and prepared bytes. Fields with a default may be absent.


class ChunkNote(Described):
    event_id: Annotated[str, Field(pattern=EVENT_ID)]


class EndNote(FleetNote):
    """In the chunk that ends the answer, and the one after it."""

    event_id: Annotated[str, Field(pattern=EVENT_ID)]


class ChatDelta(Described):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = field(default_factory=list)


class ChatChunkChoice(Described):
    index: Natural
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    token_ids: list[Natural] = field(default_factory=list)


class CompletionChunkChoice(Described):
    index: Natural
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: list[Natural] = field(default_factory=list)
    token_ids: list[Natural] = field(default_factory=list)


class ChatChunk(_Named):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    kvfleet: ChunkNote | EndNote
    usage: Usage | None = None
    prompt_token_ids: list[Natural] = field(default_factory=list)


class CompletionChunk(_Named):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    kvfleet: ChunkNote | EndNote | BatchNote
    usage: Usage | None = None


def usage_of(finished: Finished, transcript: Transcript, reasoning: int = 0) -> Usage:
    prompt, generated = finished.prompt_tokens, finished.output_tokens
    cached = CachedTokens(cached_tokens(transcript))
    return Usage(prompt, generated, prompt + generated, cached, ReasoningTokens(reasoning))


def cached_tokens(transcript: Transcript) -> int:
    """Of the first attempt: a later one, after a lost worker, says nothing about reuse."""
    if transcript.started is not None:
        return transcript.started.cached_tokens
    return transcript.finished.cached_tokens if transcript.finished is not None else 0


def fleet_note(request: str, finished: Finished, transcript: Transcript) -> FleetNote:
    started = transcript.started
    worker = finished.worker or (started.worker if started else "")
    queue_s, by_tier = (round(started.queue_s, 6), started.cached) if started else (None, {})
    return FleetNote(request, worker, cached_tokens(transcript), queue_s, by_tier)
