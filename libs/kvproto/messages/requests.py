"""What ingresses and producers ask: of placement, and of workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvproto.messages.vocabulary import (
    Addresses,
    Count,
    Encoding,
    FinishReason,
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
class Sampling:
    """How tokens are drawn. A token's random number depends on (seed, choice, generated index) alone.

    `temperature` 0 is greedy; `top_k` 0 means no limit. `seed` is drawn by the ingress or Client when the caller gives
    none, so a moved or replayed sequence draws the same tokens; a worker takes none as 0. Stop tokens are neither
    emitted nor counted.

    Logits are changed in this order: `repetition_penalty` (prompt and output, as in transformers), `frequency_penalty`
    and `presence_penalty` (output only, as OpenAI states them), `logit_bias`, stop tokens out before `min_tokens`; then
    temperature, `top_k`, `top_p` and `min_p` (least probability, as a share of the most probable token's). `logprobs`
    asks for each token's log probability by the model itself, before all of that, and that of so many alternatives.
    """

    max_tokens: Annotated[int, Range(1, 16_777_216)]
    temperature: Annotated[float, Range(0.0, 100.0)] = 1.0
    top_p: Annotated[float, Range(0.0, 1.0)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] | None = None
    stop: Annotated[tuple[Annotated[str, MaxLength(1024)], ...], MaxLength(16)] = ()
    stop_ids: Annotated[tuple[int, ...], MaxLength(256)] = ()
    ignore_eos: bool = False
    n: Annotated[int, Range(1, 128)] = 1  # choices: continuations of one prompt, each with random numbers of its own
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    frequency_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    repetition_penalty: Annotated[float, Range(0.001, 1000.0)] = 1.0
    logit_bias: LogitBias = field(default_factory=dict)
    logprobs: Annotated[int, Range(0, 128)] | None = None  # alternatives beside the token's own; None: nothing at all
    min_tokens: Count = 0
    overflow: Overflow = Overflow.ERROR


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """Which worker should do this? Tenant and model are tokens of the subject; `model` is the real name."""

    request: Name
    model: Name
    prompt_ids: Tokens32 = ()
    prompt: Text | None = None  # instead of ids, from a producer that cannot tokenise
    session: Name | None = None
    attempt: Count = 0
    excluded: Annotated[tuple[Name, ...], MaxLength(4096)] = ()  # workers this request has already lost
    max_tokens: Count = 0  # of all choices together
    policy: Name | None = None
    worker: Name | None = None  # for the policy `direct`
    priority: Annotated[int, Range(-100, 100)] = 0
    max_wait_s: Seconds | None = None  # refuse it, with a time to retry, rather than have it wait longer for a start
    excluded_regions: Annotated[tuple[Name, ...], MaxLength(256)] = ()  # that could not take it
    seeks_source: bool = False  # who is asking has a worker, and wants to know who holds most of the prompt
    deadline_ms: Annotated[int, Range(0, 2**53)] | None = None  # so long its asker waits for the answer, and then
    expires_unix_ms: Annotated[int, Range(0, 2**53)] | None = None  # does without: by its own clock


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `expected_hit` counts tokens per tier.

    `attached`: the request is known already, and `attempt` of it runs, or ended a short while ago, at `worker`: one who
    sends it there reads along from the beginning.

    `region` without a worker: ask that region's placement. With `source` it then says who of this region has blocks for
    it; `elsewhere` names a region that may have more of the prompt than `worker`. A source in another region comes with
    its addresses and the fleet's seal on them (`kvproto.regions.seal`).
    """

    request: Name
    worker: Name
    attempt: Count
    expected_hit: dict[str, int] = field(default_factory=dict)
    expected_ttft_s: float | None = None
    policy: Name = ""
    why: Text = ""
    placement: Name = ""
    source: Name = ""  # another worker that holds more of the prompt on its device or host
    source_tokens: Count = 0
    attached: bool = False
    region: Name = ""
    elsewhere: Name = ""
    source_addresses: Addresses = ()
    source_seal: Annotated[bytes, MaxLength(64)] = b""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One choice as earlier attempts left it: generation goes on after `output_ids`, unless it has ended."""

    output_ids: Tokens32 = ()
    text_sent: Count = 0  # characters that are with the client
    finished: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One attempt at one request, published to one worker; the NATS reply subject gets `Accepted` or `Failed`.

    `output_ids` are tokens that an earlier attempt generated: generation goes on after them, and `text_sent`
    characters of text are already with the client. Where several choices are asked for, `continuations` says so of each
    (none: from the beginning). `expires_unix_ms` guards against late delivery after a reconnect;
    `deadline_ms` is what remained of the caller's patience when it was sent. Either `prompt_ids` or `prompt` is set.

    An attempt that its worker knows already gets one more reader: the new inbox gets all frames from the first on.
    """

    request: Name
    attempt: Count
    model: Name
    sampling: Sampling
    inbox: Annotated[str, MaxLength(512)]  # frames of this request go here
    prompt_ids: Tokens32 = ()
    prompt: Text | None = None
    output_ids: Tokens32 = ()
    text_sent: Count = 0
    encoding: Encoding = Encoding.FRAMES
    session: Name | None = None
    priority: Annotated[int, Range(-100, 100)] = 0
    deadline_ms: Annotated[int, Range(0, 2**53)] | None = None
    expires_unix_ms: Annotated[int, Range(0, 2**53)] | None = None
    traceparent: Annotated[str, MaxLength(128)] | None = None
    watcher: Name | None = None  # the placement that booked it and wants to see it end (bare producers)
    continuations: Annotated[tuple[Continuation, ...], MaxLength(128)] = ()
    exact: bool = False  # no block that was ever quantised, and none computed on one, is used
    source: Name = ""  # a worker to pull blocks from, as placement said
    source_tokens: Count = 0
    handed_over: bool = False  # `source` lets go of the sequence: its blocks are brought whatever computing would cost
    source_addresses: Addresses = ()  # of a source in another region
    source_seal: Annotated[bytes, MaxLength(64)] = b""
    again: bool = False  # sent once more, as the answer may be lost: who reads there already is sent nothing twice

    def continuation(self, choice: int) -> Continuation:
        """Where a choice goes on."""
        if self.sampling.n == 1:
            return Continuation(self.output_ids, self.text_sent)
        return self.continuations[choice] if choice < len(self.continuations) else Continuation()


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """What a bare producer sends to `kvf.generate.<tenant>.<model>`, as a msgpack map or as JSON; flat on purpose.

    Frames go to the NATS reply subject, in the encoding of the request.
    """

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
    session: Name | None = None  # an affinity key; history stays with the producer
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


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A reader leaves. The attempt ends with its last one; without `inbox` all of them leave.

    For an attempt that was handed over it is the word that its successor has begun.
    """

    request: Name
    attempt: Count | None = None  # None: any attempt
    inbox: Annotated[str, MaxLength(512)] = ""
    received: Annotated[tuple[Count, ...], MaxLength(128)] = ()  # tokens of each choice: what comes after is forgotten


@dataclass(frozen=True, slots=True)
class ResendRequest:
    """Repeat the frames of a request from a generated index on. Also the question "are you still there?".

    `from_indices` are those of its choices where they differ; a choice beyond them begins at `from_index`.
    """

    request: Name
    attempt: Count
    from_index: Count
    inbox: Annotated[str, MaxLength(512)]
    from_indices: Annotated[tuple[Count, ...], MaxLength(128)] = ()


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A reader wants no more for now, or goes on (all of them, without `inbox`). Parked is what all want no more of."""

    request: Name
    attempt: Count
    paused: bool
    inbox: Annotated[str, MaxLength(512)] = ""
