"""Requests of ingresses and producers to placement and to workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from kvproto.messages.chats import Chat
from kvproto.messages.vocabulary import (
    Addresses,
    Count,
    EarlyStopping,
    Encoding,
    FinishReason,
    FormatType,
    GrammarForm,
    Ids,
    LogitBias,
    MaxLength,
    Name,
    Overflow,
    Range,
    Seconds,
    Text,
    Tokens32,
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output's text must be, to its end. `said`: the field that the asker gave it in, for refusals."""

    form: GrammarForm
    text: Annotated[str, MaxLength(1_048_576)] = ""
    said: Name = "response_format"


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """All is kept to whether it is `strict` or not."""

    name: Name
    schema: dict[str, Any] | None = None
    description: Text | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """As OpenAI's clients say what the output must be; see `kvproto.response_format`."""

    type: FormatType
    json_schema: JsonSchema | None = None


@dataclass(frozen=True, slots=True)
class Beams:
    """Beam search instead of draws: the `n` best of `width` beams, as transformers' `generate` finds them. A sequence's
    score is the sum of its tokens' log probabilities over its length to the power of `length_penalty`."""

    width: Annotated[int, Range(1, 128)]
    length_penalty: Annotated[float, Range(-10.0, 10.0)] = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. A token's random number depends on (seed, choice, generated index) alone.

    `temperature` 0 is greedy; `top_k` 0 means no limit. The ingress or Client draws a missing `seed`, so a moved or
    replayed sequence draws the same tokens; a worker reads none as 0. Stop tokens are neither emitted nor counted.

    Logits change in this order: `repetition_penalty` (prompt and output, as in transformers), `frequency_penalty` and
    `presence_penalty` (output only, as in OpenAI's API), `logit_bias`, no stop tokens before `min_tokens`, nothing that
    `grammar` does not allow next (its end comes first: it is no matter how many tokens there are); then
    temperature, `top_k`, `top_p` and `min_p` (least probability, as a share of the most probable token's). `logprobs`
    asks for each token's log probability before all of that, and those of so many alternatives; `prompt_logprobs` for
    the prompt's tokens, all but the first. `max_tokens` 0 generates nothing: the prompt's scores are all there is.
    """

    max_tokens: Annotated[int, Range(0, 16_777_216)]
    temperature: Annotated[float, Range(0.0, 100.0)] = 1.0
    top_p: Annotated[float, Range(0.0, 1.0)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] | None = None
    stop: Annotated[tuple[Annotated[str, MaxLength(1024)], ...], MaxLength(16)] = ()
    stop_ids: Annotated[tuple[int, ...], MaxLength(256)] = ()
    ignore_eos: bool = False
    n: Annotated[int, Range(1, 128)] = 1  # choices: independent continuations of one prompt
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    frequency_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    repetition_penalty: Annotated[float, Range(0.001, 1000.0)] = 1.0
    logit_bias: LogitBias = field(default_factory=dict)
    logprobs: Annotated[int, Range(0, 128)] | None = (
        None  # alternatives beside the token's own; None: not even that one
    )
    min_tokens: Count = 0
    overflow: Overflow = Overflow.ERROR
    grammar: Grammar | None = None
    skip_special_tokens: bool = True  # else they are part of the text, spelled out
    prompt_logprobs: Annotated[int, Range(0, 128)] | None = None  # alternatives, as in `logprobs`
    beams: Beams | None = None

    @property
    def at_once(self) -> int:
        """How many sequences it runs."""
        return self.n if self.beams is None else self.beams.width


SPARE_PRIORITY = -100  # of work that may wait: it gives way to all other work, also within a step


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """Asks for a worker. Tenant and model are tokens of the subject; `model` is the real name."""

    request: Name
    model: Name
    prompt_ids: Tokens32 = ()
    prompt: Text | None = None  # instead of ids, from a producer that cannot tokenise
    session: Name | None = None
    attempt: Count = 0
    excluded: Annotated[tuple[Name, ...], MaxLength(4096)] = ()  # workers this request has already lost
    max_tokens: Count = 0  # of all choices
    policy: Name | None = None
    worker: Name | None = None  # for the policy `direct`
    priority: Annotated[int, Range(-100, 100)] = 0
    max_wait_s: Seconds | None = None  # refuse the request, with a time to retry, if it would wait longer for a start
    excluded_regions: Annotated[tuple[Name, ...], MaxLength(256)] = ()  # that could not take it
    seeks_source: bool = False  # asks not for a worker, but for the one that holds most of the prompt
    deadline_ms: Annotated[int, Range(0, 2**53)] | None = None  # how long the requester waits for the answer
    expires_unix_ms: Annotated[int, Range(0, 2**53)] | None = None  # when it stops, by its own clock
    reusable: Count | None = None  # leading tokens whose blocks can be used; None: all. A prompt is scored without
    spare: bool = False  # only where a worker has nothing better to do; else it is refused, and comes again later
    successor: Name = ""  # the worker that goes on with a handed-over request, by the plan of its first placement


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement's decision. `region` without a worker: ask that region's placement."""

    request: Name
    worker: Name
    attempt: Count
    expected_hit: dict[str, int] = field(default_factory=dict)  # tokens by tier
    expected_ttft_s: float | None = None
    policy: Name = ""
    why: Text = ""
    placement: Name = ""
    source: Name = ""  # another worker, with more of the prompt on its device or host
    source_tokens: Count = 0
    attached: bool = False  # `attempt` already runs, or ended just now, at `worker`: its frames come from the first on
    region: Name = ""
    elsewhere: Name = ""  # a region that may have more of the prompt than `worker`
    source_addresses: Addresses = ()  # of a source in another region
    source_seal: Annotated[bytes, MaxLength(64)] = b""  # the fleet's, on these addresses (`kvproto.regions.seal`)
    then: Name = ""  # the worker that goes on after the first token, and is told to fetch blocks ahead


@dataclass(frozen=True, slots=True)
class Continuation:
    """One choice after earlier attempts: generation goes on after `output_ids`, unless it has ended."""

    output_ids: Tokens32 = ()
    text_sent: Count = 0  # characters that the client has
    finished: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One attempt, published to one worker; the NATS reply subject gets `Accepted` or `Failed`. One of `prompt_ids`,
    `prompt` and `chat` is set. A known attempt gets one more reader: the new inbox gets all frames from the first on.
    """

    request: Name
    attempt: Count
    model: Name
    sampling: Sampling
    inbox: Annotated[str, MaxLength(512)]  # gets the frames
    prompt_ids: Tokens32 = ()
    prompt: Text | None = None
    output_ids: Tokens32 = ()  # of an earlier attempt: generation goes on after them
    text_sent: Count = 0  # characters that the client has
    encoding: Encoding = Encoding.FRAMES
    session: Name | None = None
    priority: Annotated[int, Range(-100, 100)] = 0
    deadline_ms: Annotated[int, Range(0, 2**53)] | None = None  # time that was left when it was sent
    expires_unix_ms: Annotated[int, Range(0, 2**53)] | None = None  # guards against delivery after a reconnect
    traceparent: Annotated[str, MaxLength(128)] | None = None
    watcher: Name | None = None  # the placement that booked it and waits for its end (bare producers)
    continuations: Annotated[tuple[Continuation, ...], MaxLength(128)] = ()  # of several choices; (): none has begun
    exact: bool = False  # use no block that was ever quantised, and none computed on one
    source: Name = ""  # a worker to pull blocks from, by placement's decision
    source_tokens: Count = 0
    handed_over: bool = False  # its last worker gave it up: pull its blocks whatever computing would cost
    source_addresses: Addresses = ()  # of a source in another region
    source_seal: Annotated[bytes, MaxLength(64)] = b""
    again: bool = False  # repeated, as the answer may be lost: a known reader gets no frame twice
    scored: Count = 0  # leading tokens of the prompt that need no scores: the client has theirs
    chat: Chat | None = None  # instead of a prompt
    then: Name = ""  # after the first token it is handed over to this worker, or another one that decodes
    ahead: bool = False  # not to be run: `source` prefills it, and hands it over to this worker, which fetches blocks

    @property
    def text(self) -> str | None:
        """What its worker tokenises."""
        return self.prompt if self.chat is None else self.chat.text

    def continuation(self, choice: int) -> Continuation:
        if self.sampling.n == 1:
            return Continuation(self.output_ids, self.text_sent)
        return self.continuations[choice] if choice < len(self.continuations) else Continuation()

    def ahead_from(self, prefiller: str) -> GenerateRequest:
        """What the worker is told that will go on with it."""
        told = replace(self, then="", ahead=True, watcher=None, traceparent=None)
        return replace(told, source=prefiller, source_tokens=0, source_addresses=(), handed_over=False)


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """A bare producer's request to `kvf.generate.<tenant>.<model>`, as a msgpack map or as JSON. Frames go to the NATS
    reply subject, in the encoding of the request."""

    prompt: Text | None = None
    prompt_ids: Annotated[tuple[int, ...], Ids(max_items=4_194_304)] = ()
    model: Name | None = None  # the real name, where it is no legal subject token
    max_tokens: Annotated[int, Range(1, 16_777_216)] = 50
    temperature: Annotated[float, Range(0.0, 100.0)] = 1.0
    top_p: Annotated[float, Range(0.0, 1.0)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] | None = None
    stop: Annotated[tuple[Annotated[str, MaxLength(1024)], ...], MaxLength(16)] = ()
    ignore_eos: bool = False
    session: Name | None = None  # an affinity key; the producer keeps the history
    priority: Annotated[int, Range(-100, 100)] = 0
    deadline_ms: Annotated[int, Range(0, 2**53)] | None = None
    request: Annotated[str, MaxLength(64)] | None = None
    traceparent: Annotated[str, MaxLength(128)] | None = None
    n: Annotated[int, Range(1, 128)] = 1
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    frequency_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    repetition_penalty: Annotated[float, Range(0.001, 1000.0)] = 1.0
    logit_bias: LogitBias = field(default_factory=dict)
    logprobs: Annotated[int, Range(0, 128)] | None = None
    min_tokens: Count = 0
    context_overflow: Overflow = Overflow.ERROR
    exact: bool = False
    grammar: Grammar | None = None
    response_format: ResponseFormat | None = None  # instead of a grammar
    skip_special_tokens: bool = True
    messages: Any = None  # instead of a prompt: as in OpenAI's chat completions, as are the others
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None
    prompt_logprobs: Annotated[int, Range(0, 128)] | None = None
    beams: Beams | None = None
    expect_return_s: Seconds | None = None  # from this turn's end to the conversation's next one


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A reader leaves, and the attempt ends with its last reader. After a hand-over: the successor has begun."""

    request: Name
    attempt: Count | None = None  # None: any attempt
    inbox: Annotated[str, MaxLength(512)] = ""  # of the reader; "": all readers
    received: Annotated[tuple[Count, ...], MaxLength(128)] = ()  # tokens of each choice: later ones are dropped


@dataclass(frozen=True, slots=True)
class ResendRequest:
    """Repeat the frames of a request from a generated index on: `from_indices` by choice, `from_index` for others. Also
    tests whether the worker lives."""

    request: Name
    attempt: Count
    from_index: Count
    inbox: Annotated[str, MaxLength(512)]
    from_indices: Annotated[tuple[Count, ...], MaxLength(128)] = ()
    scored: Count = 0  # as a GenerateRequest's


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A reader pauses or goes on. A request is parked while all its readers pause."""

    request: Name
    attempt: Count
    paused: bool
    inbox: Annotated[str, MaxLength(512)] = ""  # of the reader; "": all readers


@dataclass(frozen=True, slots=True)
class ReturnExpected:
    """A turn has ended, and its conversation is likely to go on: said to the worker that has its blocks, and heard by
    every placement. Seconds count from now."""

    tenant: Name
    request: Name
    attempt: Count
    session: Name
    soonest_s: Seconds
    latest_s: Seconds  # then its blocks are as others
