"""Whether a worker takes a request, and the sequences that it becomes. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvfleet.worker.port.capacity import could_give_way, full, until_served
from kvfleet.worker.port.sequence_spec import Locate, SequenceSpec, SequenceTrace
from kvproto import codec
from kvproto.block_hash import Root, pack_ids
from kvproto.errors import EXPIRES, Draining, InvalidRequest, Overloaded, Unavailable
from kvproto.messages import GenerateRequest, Load, Rates, Sampling
from kvproto.subjects import PLACEMENT_INBOX, VAULT_INBOX, WORKER_INBOX, is_inbox, is_of_the_fleet

NOT_FOR_FRAMES = (PLACEMENT_INBOX, WORKER_INBOX, VAULT_INBOX)  # frames there would be taken for answers


def of_its_asker(request: GenerateRequest, reply: str, fleet_key: bytes, max_priority: int) -> GenerateRequest:
    """Cut to `max_priority` unless an ingress or a placement asks, which have cut it already: a producer may publish to
    workers itself, and higher priorities displace others' requests."""
    if request.priority <= max_priority or is_of_the_fleet(reply, fleet_key):
        return request
    return replace(request, priority=max_priority)


def check_request(request: GenerateRequest, *, draining: bool, unix_ms: float) -> None:
    """Raises the KvfleetError for which this worker never takes the request."""
    if not is_inbox(request.inbox) or request.inbox.partition(".")[0] in NOT_FOR_FRAMES:
        raise InvalidRequest("must be a reader's inbox: it begins with _ and has no wildcard", field="inbox")
    if bool(request.prompt_ids) + (request.prompt is not None) + (request.chat is not None) != 1:
        one_of = "exactly one of prompt_ids, prompt and chat must be given and not empty"
        raise InvalidRequest(one_of, field="prompt")
    if request.prompt == "":
        raise InvalidRequest("must not be empty", field="prompt")
    if draining:
        raise Draining("this worker is draining")
    if request.expires_unix_ms is not None and request.expires_unix_ms < unix_ms:
        # No client waits for so long; one that does has a wrong clock.
        raise Unavailable("the request arrived after its deadline, by this worker's clock", field=EXPIRES)


def content_of(request: GenerateRequest, ids: tuple[int, ...], tenant: str) -> bytes:
    """A digest of tenant and request: a repeat has the same one, however many outputs it has already."""
    bias = dict(sorted(request.sampling.logit_bias.items()))
    asked = codec.encode(replace(request.sampling, logit_bias=bias))
    digest = hashlib.blake2b(pack_ids(ids), digest_size=16)
    chat = b"" if request.chat is None else request.chat.text.encode()  # more than what the model sees of it
    named = tenant.encode(), request.model.encode()
    digest.update(b"%s\0%s\0%d\0%d\0%s%s" % (*named, request.exact, len(chat), chat, asked))
    return digest.digest()


def check_capacity(
    request: GenerateRequest, *, taken: int, limit: int, load: Load, rates: Rates, leaving: int = 0
) -> int:
    """Returns how many sequences of lower priority have to give way; `leaving` of those `taken` are going already. The
    wait is no reason to refuse a continued attempt: no other worker gets it. Raises InvalidRequest or Overloaded."""
    if request.sampling.n > limit:
        raise InvalidRequest(f"this worker takes at most {limit} choices, waiting and running", field="n")
    wait_s = until_served(load, rates, request.priority)
    goes_on = request.attempt or request.output_ids or request.continuations or request.handed_over
    if request.deadline_ms is not None and wait_s > request.deadline_ms / 1000 and not goes_on:
        late_s = wait_s - request.deadline_ms / 1000
        raise Overloaded(f"it would wait for {wait_s:.1f} s, past its deadline", retry_after_s=round(late_s, 3))
    excess = taken - leaving + request.sampling.n - limit
    if excess > 0 and excess > could_give_way(load, request.priority, leaving):
        raise full(wait_s / max(load.waiting, 1))  # until the next one is served
    return max(excess, 0)


def sequences_of(
    request: GenerateRequest,
    choices: Iterable[int],
    *,
    prompt_ids: tuple[int, ...],
    root: Root,
    tenant: str,
    deadline: float | None,
    adapter: str = "",
    location: Locate = lambda choice: None,
    trace: SequenceTrace | None = None,
    sampling: Sampling | None = None,
) -> Iterator[SequenceSpec]:
    """One per choice, from where an earlier attempt left it. The first has the `trace`, and scores the prompt.
    `sampling`: instead of the request's."""
    scored = None if request.sampling.prompt_logprobs is None else request.scored
    for choice in choices:
        before = request.continuation(choice)
        yield SequenceSpec(
            request=request.request,
            attempt=request.attempt,
            prompt_ids=prompt_ids,
            sampling=sampling or request.sampling,
            root=root,
            output_ids=before.output_ids,
            text_sent=before.text_sent,
            tenant=tenant,
            adapter=adapter,
            priority=request.priority,
            deadline=deadline,
            choice=choice,
            exact=request.exact,
            location=location(choice),
            trace=trace,
            scored=scored,
        )
        trace = scored = None
