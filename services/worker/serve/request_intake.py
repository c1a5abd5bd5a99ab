"""Whether a worker takes a request, and the sequences that it becomes. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from kvfleet.worker.blocks.chain_location import ChainLocation
from kvfleet.worker.schedule.giving_way import could_give_way, full, until_served
from kvfleet.worker.schedule.sequence import SequenceSpec, SequenceTrace
from kvproto import codec
from kvproto.block_hash import Root, pack_ids
from kvproto.errors import EXPIRES, Draining, InvalidRequest, ModelNotFound, Overloaded, Unavailable
from kvproto.messages import GenerateRequest, Load, Rates
from kvproto.subjects import PLACEMENT_INBOX, VAULT_INBOX, WORKER_INBOX, is_inbox, is_of_the_fleet

NOT_FOR_FRAMES = (PLACEMENT_INBOX, WORKER_INBOX, VAULT_INBOX)  # what comes there would be taken for an answer


def of_its_asker(request: GenerateRequest, reply: str, fleet_key: bytes, max_priority: int) -> GenerateRequest:
    """With no more than `max_priority`, unless an ingress or a placement asks: these have cut it as is due. Higher ones
    send others' waiting requests away, and a producer may publish to workers itself."""
    if request.priority <= max_priority or is_of_the_fleet(reply, fleet_key):
        return request
    return replace(request, priority=max_priority)


def check_request(request: GenerateRequest, *, model: str, draining: bool, unix_ms: float) -> None:
    """Raises the KvfleetError for which this worker does not take the request at any time."""
    if not is_inbox(request.inbox) or request.inbox.partition(".")[0] in NOT_FOR_FRAMES:
        raise InvalidRequest("must be a reader's inbox: it begins with _ and has no wildcard", field="inbox")
    if bool(request.prompt_ids) == (request.prompt is not None):
        raise InvalidRequest("exactly one of prompt_ids and prompt must be given and not empty", field="prompt")
    if request.prompt == "":
        raise InvalidRequest("must not be empty", field="prompt")
    if request.model != model:
        raise ModelNotFound(f"this worker serves {model!r}, not {request.model!r}", field="model")
    if draining:
        raise Draining("this worker is draining")
    if request.expires_unix_ms is not None and request.expires_unix_ms < unix_ms:
        # No client waits for one that NATS kept back for so long; one that does has a wrong clock.
        raise Unavailable("the request arrived after its deadline, by this worker's clock", field=EXPIRES)


def content_of(request: GenerateRequest, ids: tuple[int, ...], tenant: str) -> bytes:
    """A digest of whose request this is and what it asks for: a repeat has the same one, whatever it knows already."""
    bias = dict(sorted(request.sampling.logit_bias.items()))
    asked = codec.encode(replace(request.sampling, logit_bias=bias))
    digest = hashlib.blake2b(pack_ids(ids), digest_size=16)
    digest.update(b"%s\0%d\0%s" % (tenant.encode(), request.exact, asked))
    return digest.digest()


def check_capacity(
    request: GenerateRequest, *, taken: int, limit: int, load: Load, rates: Rates, leaving: int = 0
) -> int:
    """Every choice is a sequence of its own; `leaving` of those `taken` were asked to give way, and are still counted.
    Returns how many sequences of lower priority have to give way. What goes on after an earlier attempt is not judged
    by how long it will wait: nobody else will be asked. Raises InvalidRequest, or Overloaded for now."""
    if request.sampling.n > limit:
        raise InvalidRequest(f"this worker takes at most {limit} choices, waiting and running", field="n")
    wait_s = until_served(load, rates, request.priority)
    goes_on = request.attempt or request.output_ids or request.continuations or request.handed_over
    if request.deadline_ms is not None and wait_s > request.deadline_ms / 1000 and not goes_on:
        late_s = wait_s - request.deadline_ms / 1000
        raise Overloaded(f"it would wait for {wait_s:.1f} s, past its deadline", retry_after_s=round(late_s, 3))
    excess = taken - leaving + request.sampling.n - limit
    if excess > 0 and excess > could_give_way(load, request.priority, leaving):
        raise full(wait_s / max(load.waiting, 1))  # until the next one is served there is no room for another
    return max(excess, 0)


def sequences_of(
    request: GenerateRequest,
    choices: Iterable[int],
    *,
    prompt_ids: tuple[int, ...],
    root: Root,
    tenant: str,
    deadline: float | None,
    location: Callable[[int], ChainLocation | None] = lambda choice: None,
    trace: SequenceTrace | None = None,
) -> Iterator[SequenceSpec]:
    """One per choice that is to be generated, each where an earlier attempt left it. `location`: of a choice;
    `trace`: the first one's."""
    for choice in choices:
        before = request.continuation(choice)
        yield SequenceSpec(
            request=request.request,
            attempt=request.attempt,
            prompt_ids=prompt_ids,
            sampling=request.sampling,
            root=root,
            output_ids=before.output_ids,
            text_sent=before.text_sent,
            tenant=tenant,
            priority=request.priority,
            deadline=deadline,
            choice=choice,
            exact=request.exact,
            location=location(choice),
            trace=trace,
        )
        trace = None
