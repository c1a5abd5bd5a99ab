"""Reads what arrives on placement's subjects into events. Pure and total: bad input comes back as a `Fail`.

Tenant and model token are the subject's: NATS permissions guard subjects, not bodies. Replies go to inboxes only: a
requester that named a fleet subject as its reply could make a worker publish there with the worker's rights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from kvfleet.placement.events import CapsuleHeard, Fail, GenerateAsked, PlaceAsked, WatchesHeard, failed_frame
from kvproto import codec, subjects
from kvproto.chats import FIELDS, chat_of
from kvproto.errors import CodecError, InvalidRequest, KvfleetError
from kvproto.ids import is_token, model_token
from kvproto.messages import Capsule, Chat, Encoding, Frame, PlaceRequest, ProducerRequest, Watches
from kvproto.response_format import grammar_of
from kvproto.subjects import INGRESS_INBOX, PLACEMENT_INBOX, WORKER_INBOX

WORKER_CONNECTION = "worker-"  # workers name their connections worker-<id>


def is_inbox(reply: str, *, of_producer: bool = False, of_worker: bool = False, tenant: str | None = None) -> bool:
    """Whether an answer may go to this subject: an inbox outside the spaces of placements and, unless a worker asks, of
    workers. A producer's is no inbox of an ingress either, as workers write there many times, nor another tenant's."""
    if tenant is not None and not subjects.may_read(reply, tenant):
        return False
    space = reply.partition(".")[0]
    if of_producer and space == INGRESS_INBOX:
        return False
    if not (subjects.is_inbox(reply) if of_producer else subjects.is_answer_inbox(reply)):
        return False
    return space not in ((PLACEMENT_INBOX,) if of_worker else (PLACEMENT_INBOX, WORKER_INBOX))


def read_place(subject: str, reply: str, data: bytes, *, max_priority: int = 100) -> PlaceAsked | Fail:
    """Higher priorities are cut."""
    request, attempt = "", 0
    try:
        tenant, token = _tenant_and_model(subject)
        ask = codec.decode(PlaceRequest, data)
        request, attempt = ask.request, ask.attempt
        _check_model(ask.model, token)
    except KvfleetError as error:
        return Fail(reply, failed_frame(error, request, attempt))
    return PlaceAsked(reply, tenant, replace(ask, priority=max_priority) if ask.priority > max_priority else ask)


def read_generate(
    subject: str, reply: str, data: bytes, *, as_json: bool, new_request: str, new_seed: int, unix_ms: int
) -> GenerateAsked | Fail:
    """`new_request` and `new_seed` stand in where the producer gives none; the seed of a request with an id of the
    producer's is made of that, so that a repetition has the same."""
    encoding = Encoding.JSON if as_json else Encoding.MSGPACK
    request = ""
    try:
        tenant, token = _tenant_and_model(subject)
        ask = codec.decode_plain(ProducerRequest, data, as_json=as_json)
        if ask.request is not None and not is_token(ask.request):
            raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field="request")
        request = ask.request or new_request
        chat = _read_prompt(ask, unix_ms)
        if ask.model is not None:
            _check_model(ask.model, token)
        if ask.response_format is not None:
            if ask.grammar is not None:
                raise InvalidRequest("give either grammar or response_format, not both", field="grammar")
            ask = replace(ask, grammar=grammar_of(ask.response_format))
    except KvfleetError as error:
        return Fail(reply, failed_frame(error, request), encoding)
    seed = ask.seed
    if seed is None and ask.request is None:
        seed = new_seed
    elif seed is None:
        digest = hashlib.blake2b(f"{tenant}.{request}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    return GenerateAsked(reply, encoding, tenant, token, request, seed, unix_ms, ask, chat=chat)


def _read_prompt(ask: ProducerRequest, unix_ms: int) -> Chat | None:
    """The chat, if it is one. Raises InvalidRequest."""
    if ask.prompt is not None and ask.prompt_ids:
        raise InvalidRequest("give either prompt or prompt_ids, not both", field="prompt")
    said = {name: value for name in FIELDS if (value := getattr(ask, name)) is not None}
    if "messages" in said:
        if ask.prompt is not None or ask.prompt_ids:
            raise InvalidRequest("give either messages or a prompt, not both", field="messages")
        return chat_of(**said, unix_s=unix_ms // 1000)
    for name in said:
        raise InvalidRequest("only allowed when messages are given", field=name)
    if ask.prompt is None and not ask.prompt_ids:
        raise InvalidRequest("give prompt, prompt_ids or messages, not empty", field="prompt")
    if ask.prompt == "":
        raise InvalidRequest("must not be empty", field="prompt")
    return None


def read_answer(data: bytes) -> list[Frame]:
    """Frames in compact form, or one as the producer gets it. Raises CodecError."""
    as_json = data[:1] == b"{"
    if not as_json and not (data and codec.is_map_marker(data[0])):
        return codec.decode_frames(data)
    try:
        return [codec.decode_plain_frame(data, as_json=as_json)]
    except (ValueError, TypeError, RecursionError):
        raise CodecError("not a frame") from None


def read_capsule(reply: str, data: bytes) -> CapsuleHeard:
    """Raises InvalidRequest, CodecError among them."""
    capsule = codec.decode(Capsule, data)
    _check_taker(reply)
    _check_taken_over(capsule.tenant, capsule.request.request, capsule.worker, capsule.request.inbox)
    return CapsuleHeard(reply, capsule)


def read_watches(reply: str, data: bytes) -> WatchesHeard:
    """Raises InvalidRequest, CodecError among them."""
    watches = codec.decode(Watches, data)
    _check_taker(reply)
    for one in watches.items:
        _check_taken_over(one.tenant, one.request, one.worker, one.inbox)
        if not one.epoch:
            raise InvalidRequest("must not be empty", field="epoch")
    return WatchesHeard(watches, reply)


def read_disconnect(data: bytes) -> str | None:
    """The worker that a server's `$SYS.ACCOUNT.*.DISCONNECT` notice is about, if any."""
    try:
        name = json.loads(data)["client"]["name"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or not name.startswith(WORKER_CONNECTION):
        return None
    worker = name.removeprefix(WORKER_CONNECTION)
    return worker if is_token(worker) else None


def _check_taker(reply: str) -> None:
    if reply and not subjects.is_answer_inbox(reply):
        raise InvalidRequest("must be an inbox", field="reply")


def _check_taken_over(tenant: str, request: str, worker: str, inbox: str) -> None:
    """As strictly as producers' requests: subjects are made of these."""
    for name, value in (("tenant", tenant), ("request", request), ("worker", worker)):
        if not is_token(value):
            raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field=name)
    if not is_inbox(inbox, of_producer=True, tenant=tenant):
        raise InvalidRequest("must be a producer's inbox", field="inbox")


def tenant_in(subject: str) -> str:
    """Subjects are `<namespace>.place.<tenant>.<model>` and `<namespace>.generate.<tenant>.<model>`."""
    return subject.split(".")[-2]


def _tenant_and_model(subject: str) -> tuple[str, str]:
    tenant, token = subject.split(".")[-2:]
    for name, value in (("tenant", tenant), ("model", token)):
        if not is_token(value):
            raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ - in the subject", field=name)
    return tenant, token


def _check_model(name: str, token: str) -> None:
    if model_token(name) != token:
        raise InvalidRequest(f"{name[:64]!r} belongs to another subject than {token}", field="model")
