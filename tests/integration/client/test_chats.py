"""Chats over NATS alone: a worker renders them, and reads the message of what its model writes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import jsonschema
import msgpack
import nats
import pytest
from nats.aio.client import Client as Nats

from kvfleet.placement.loop import PlacementLoop
from kvproto.chats import chat_of
from kvproto.client import Client, Generation
from kvproto.connection import Connection
from kvproto.errors import InvalidRequest, Unavailable
from kvproto.ids import new_process_id
from kvproto.messages import (
    AssistantMessage,
    ChoiceFinished,
    Finished,
    FormatType,
    Grammar,
    GrammarForm,
    JsonSchema,
    ResponseFormat,
    Role,
    Sampling,
    Started,
    Tokens,
    WorkerRecord,
)
from kvproto.streams.stream import Stream
from kvproto.subjects import PLACEMENT_INBOX, Subjects, inbox_prefix
from kvservice.membership import member_record
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S, until

PARAMETERS = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": 12,
            "maxItems": 12,
            "items": {"type": "string", "pattern": "^[a-z]{5,9}$"},
        }
    },
    "required": ["items"],
    "additionalProperties": False,
}
NOTE = {"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}
SAID = [{"role": "user", "content": "Take a note."}]
MUST = {"messages": SAID, "tools": [NOTE], "tool_choice": "required", "parallel_tool_calls": False}
SAMPLING = Sampling(max_tokens=400, temperature=0.9, seed=7)
CALL = Generation("demo", SAMPLING, chat=chat_of(**MUST))
Read = tuple[list[AssistantMessage], list[Tokens]]


async def ready(client: Client, count: int) -> None:
    await until(lambda: len(list(client.members.view.ready())) == count)


def joined(tokens: list[Tokens], choice: int = 0) -> tuple[str, str, list[str], list[str]]:
    """Content, reasoning, names and arguments of a choice's deltas."""
    deltas = [delta for one in tokens if one.choice == choice for delta in one.deltas]
    calls: dict[int, list[str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls):
        calls.setdefault(part.index, [part.name, ""])[1] += part.arguments
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning_content for delta in deltas),
        [name for name, _ in calls.values()],
        [arguments for _, arguments in calls.values()],
    )


async def read(stream: Stream) -> Read:
    """The messages of all choices, and the frames with tokens."""
    tokens: list[Tokens] = []
    messages: dict[int, AssistantMessage] = {}
    async for event in stream:
        if isinstance(event, Tokens):
            assert len(event.deltas) == len(event.ids)
            tokens.append(event)
        elif isinstance(event, ChoiceFinished):
            assert event.message is not None
            messages[event.choice] = event.message
        elif isinstance(event, Finished):
            assert event.message is not None
            assert messages.setdefault(0, event.message) == event.message
    return [message for _, message in sorted(messages.items())], tokens


def check_note(message: AssistantMessage) -> None:
    assert message.finish_reason == "tool_calls"
    assert message.content == ""
    (call,) = message.tool_calls
    assert call.name == "note"
    assert len(call.id) == 9
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)


# ---------------------------------------------------------------------------------------------- Client


async def test_a_call_comes_as_deltas_and_whole(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    (message,), tokens = await read(client.generate(CALL))
    check_note(message)
    content, _, names, arguments = joined(tokens)
    assert (content, names, arguments) == ("", ["note"], [message.tool_calls[0].arguments])
    assert sum(bool(delta.tool_calls) for one in tokens for delta in one.deltas) > 10, "as it is written"
    raw = "".join(text for one in tokens for text in one.text)
    assert raw.startswith("<tool_call>"), "tokens say what the model wrote"


@pytest.mark.parametrize("killed_at", [1, 12, 60])
async def test_a_killed_worker_changes_no_byte(fleet: FakeFleet, client: Client, killed_at: int) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=150)
    await ready(client, 2)
    whole = await read(client.generate(replace(CALL, request="a")))
    check_note(whole[0][0])
    tokens: list[Tokens] = []
    message, killed = None, ""
    async with client.generate(replace(CALL, request="b")) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                tokens.append(event)
                if not killed and sum(len(one.ids) for one in tokens) >= killed_at:
                    killed = str(stream.worker)
                    await fleet.workers[killed].kill()
            elif isinstance(event, Finished):
                message = event.message
                assert event.worker != killed
    assert killed
    assert message is not None
    assert replace(message, tool_calls=()) == replace(whole[0][0], tool_calls=())
    assert message.tool_calls[0].arguments == whole[0][0].tool_calls[0].arguments
    assert joined(tokens) == joined(whole[1])
    assert [delta.content for one in tokens for delta in one.deltas] == [
        delta.content for one in whole[1] for delta in one.deltas
    ]


async def test_choices_have_messages_of_their_own_wherever_they_end(fleet: FakeFleet, client: Client) -> None:
    """One that an earlier attempt ended is not read again, and choice 0's message is in the end as well."""
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=200)
    await ready(client, 2)
    words = {"type": "object", "properties": {"words": {"type": "array", "items": {"enum": ["sea", "rain"]}}}}
    tool = {"type": "function", "function": {"name": "say", "parameters": {**words, "required": ["words"]}}}
    chat = chat_of(SAID, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    asked = Generation("demo", Sampling(60, temperature=1.2, seed=3, n=3), chat=chat)
    messages, _ = await read(client.generate(replace(asked, request="a")))
    assert len({one.tool_calls[0].arguments for one in messages}) == 3
    killed, again = "", {}
    async with client.generate(replace(asked, request="b")) as stream:
        async for event in stream:
            if isinstance(event, ChoiceFinished):
                again[event.choice] = event.message
                if not killed and len(again) < 3:
                    killed = str(stream.worker)
                    await fleet.workers[killed].kill()
            elif isinstance(event, Finished):
                assert event.message == again[0]
    assert killed
    bare = [[(call.name, call.arguments) for call in one.tool_calls] for one in messages]
    assert [[(call.name, call.arguments) for call in again[at].tool_calls] for at in range(3)] == bare


async def test_turns_of_one_chat_meet_where_its_blocks_are(fleet: FakeFleet, client: Client) -> None:
    for worker in ("w0", "w1", "w2"):
        await fleet.start(worker)
    await ready(client, 3)
    long = [{"role": "system", "content": "Be brief. " * 30}, {"role": "user", "content": "Who goes there? " * 9}]
    workers: set[str] = set()
    for turn in range(4):
        said: list[Any] = [*long, *({"role": "assistant", "content": f"It is {at}."} for at in range(turn))]
        async for event in client.generate(Generation("demo", Sampling(4, temperature=0.0), chat=chat_of(said))):
            if isinstance(event, Started):
                workers.add(event.worker)
                assert (event.cached_tokens > 100) == (turn > 0)
    assert len(workers) == 1


async def test_a_chat_of_a_model_without_a_template(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0")
    desk = worker.loop.requests
    desk._chats = type(desk._chats)(replace(worker.loop.parts.bundle, chat_template=None), worker.loop.parts.text)
    await ready(client, 1)
    with pytest.raises(InvalidRequest) as refused:
        await read(client.generate(CALL))
    assert refused.value.field in ("tools", "model")
    with pytest.raises(InvalidRequest, match="no chat template") as refused:
        await read(client.generate(replace(CALL, chat=chat_of(SAID))))
    assert refused.value.field == "model"


async def test_only_one_of_prompt_ids_and_chat(client: Client) -> None:
    for other in ({"prompt": "x"}, {"prompt_ids": (1,)}):
        with pytest.raises(InvalidRequest, match="exactly one"):
            client.generate(replace(CALL, **other))
    for bad in (float("nan"), b"x", {1, 2}, "\ud800"):
        with pytest.raises(InvalidRequest, match="is no JSON") as refused:
            chat_of([{"role": "user", "content": bad}])
        assert refused.value.field == "messages"


async def test_a_worker_that_renders_no_chats_is_not_asked(
    fleet: FakeFleet, client: Client, nats_url: str, fleet_buckets: Subjects
) -> None:
    old = await fleet.start("w0")
    seen: list[bytes] = []

    async def hear(message: Any) -> None:
        seen.append(message.data)

    await client.connection.subscribe(client.subjects.worker_generate_all("w0"), hear)
    await client.connection.synced()
    record = old.loop.parts.lease.record
    assert isinstance(record, WorkerRecord)
    await old.loop.parts.lease.set(replace(record, chats=False))
    await until(lambda: [view.record.chats for view in client.members.view.ready()] == [False])
    with pytest.raises(Unavailable, match="renders no chats") as refused:
        await read(client.generate(replace(CALL, patience_s=0.5)))
    assert refused.value.field == "messages"
    assert seen == []
    await read_text(client.generate(Generation("demo", Sampling(4), prompt="Hark")))
    assert len(seen) == 1


async def read_text(stream: Stream) -> str:
    text = ""
    async for event in stream:
        if isinstance(event, Tokens):
            assert event.deltas == ()
            text += "".join(event.text)
        elif isinstance(event, Finished):
            assert event.message is None
    return text


# ---------------------------------------------------------------------------------------------- bare producers


class Producer:
    """Plain nats-py."""

    def __init__(self, nc: Nats, subjects: Subjects, *, as_json: bool) -> None:
        self.nc, self.subjects, self.as_json = nc, subjects, as_json

    async def ask(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Frames, up to the last one."""
        frames: asyncio.Queue[Any] = asyncio.Queue()

        async def on_frame(message: Any) -> None:
            frames.put_nowait(json.loads(message.data) if self.as_json else msgpack.unpackb(message.data))

        inbox = self.nc.new_inbox()
        await self.nc.subscribe(inbox, cb=on_frame)
        await self.nc.publish(
            self.subjects.generate("public", "demo"),
            json.dumps(body).encode() if self.as_json else msgpack.packb(body),
            reply=inbox,
            headers={"Content-Type": "application/json"} if self.as_json else None,
        )
        async with asyncio.timeout(LIMIT_S):
            while True:
                frame = await frames.get()
                yield frame
                if frame["type"] in ("finished", "failed"):
                    return


@pytest.fixture(params=["json", "msgpack"])
async def producer(request: pytest.FixtureRequest, nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Producer]:
    nc = await nats.connect(nats_url)
    yield Producer(nc, fleet_buckets, as_json=request.param == "json")
    await nc.close()


@pytest.fixture
async def placement(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[PlacementLoop]:
    name = new_process_id()
    connection = await Connection.open(nats_url, name=name, inbox_prefix=inbox_prefix(PLACEMENT_INBOX, name))
    placement = PlacementLoop(connection, fleet_buckets, member_record(Role.PLACEMENT, name), chance=random.random)
    await placement.start()
    yield placement
    await placement.stop(grace_s=0)
    await connection.close()
    assert placement.internal_errors_total == 0


async def known(placement: PlacementLoop, *workers: str) -> None:
    await until(lambda: {one.id for one in placement.core.fleet.ready("demo").workers} == set(workers))


ASKED: dict[str, Any] = {**MUST, "max_tokens": 400, "temperature": 0.9, "seed": 7}


async def whole(producer: Producer, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [frame async for frame in producer.ask(body)]


async def told(producer: Producer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """As a producer does that asks again: on a busy machine a first grammar may take longer than an offer."""
    async with asyncio.timeout(LIMIT_S):
        while (frames := await whole(producer, body))[-1].get("retryable"):
            await asyncio.sleep(0.1)
    assert frames[-1]["type"] == "finished", frames[-1]
    return frames


async def test_a_producer_gets_its_message_parsed(
    fleet: FakeFleet, placement: PlacementLoop, producer: Producer, client: Client
) -> None:
    await fleet.start("w0")
    await known(placement, "w0")
    frames = await told(producer, ASKED)
    assert [frame["type"] for frame in frames if frame["type"] != "tokens"] == ["started", "finished"]
    message = frames[-1]["message"]
    assert message["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call.keys() == {"id", "name", "arguments"}
    jsonschema.validate(json.loads(call["arguments"]), PARAMETERS)
    deltas = [delta for frame in frames if frame["type"] == "tokens" for delta in frame["deltas"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert [(part["index"], part["name"], part["id"]) for part in parts if "name" in part] == [(0, "note", call["id"])]
    assert "".join(part.get("arguments", "") for part in parts) == call["arguments"]
    await ready(client, 1)
    (same,), _ = await read(client.generate(CALL))
    assert same.tool_calls[0].arguments == call["arguments"], "whichever way it came"


async def test_a_history_with_calls_and_answers(fleet: FakeFleet, placement: PlacementLoop, producer: Producer) -> None:
    await fleet.start("w0")
    await known(placement, "w0")
    call = {"id": "c1", "type": "function", "function": {"name": "note", "arguments": '{"items": []}'}}
    history = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Taken."},
    ]
    body = {"messages": history, "tools": [NOTE], "tool_choice": "none", "max_tokens": 9, "temperature": 0}
    frames = await told(producer, body)
    message = frames[-1]["message"]
    text = "".join(text for frame in frames if frame["type"] == "tokens" for text in frame["text"])
    assert message == {"finish_reason": "length", "content": text}
    shorter = await told(producer, {**body, "messages": SAID})
    assert shorter[0]["prompt_tokens"] < frames[0]["prompt_tokens"]


async def test_a_schema_is_for_the_content(fleet: FakeFleet, placement: PlacementLoop, producer: Producer) -> None:
    await fleet.start("w0")
    await known(placement, "w0")
    schema = {"type": "json_schema", "json_schema": {"name": "note", "schema": PARAMETERS}}
    frames = await told(producer, {"messages": SAID, "response_format": schema, "max_tokens": 400, "seed": 1})
    message = frames[-1]["message"]
    jsonschema.validate(json.loads(message["content"]), PARAMETERS)
    assert (message["finish_reason"], "tool_calls" in message) == ("stop", False)


async def test_a_drained_worker_changes_no_byte_of_a_producers_message(
    fleet: FakeFleet, placement: PlacementLoop, producer: Producer
) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=100, drain_s=8.0)
    await known(placement, "w0", "w1")
    expected = (await told(producer, ASKED))[-1]["message"]
    drained: asyncio.Task[None] | None = None
    deltas: list[Any] = []
    first = last = ""
    async for frame in producer.ask(ASKED):
        if frame["type"] == "started":
            first = first or frame["worker"]
        elif frame["type"] == "tokens":
            deltas += frame["deltas"][max(len(deltas) - frame["index"], 0) :]
            if drained is None and len(deltas) >= 20:
                fleet.workers[first].loop.parts.somebody_is_ready = lambda models: True
                drained = asyncio.create_task(fleet.workers[first].loop.drain())
        elif frame["type"] == "finished":
            last = frame["worker"]
            message = frame["message"]
    assert drained is not None
    assert first != last
    calls = [
        [{"name": one["name"], "arguments": one["arguments"]} for one in of["tool_calls"]] for of in (message, expected)
    ]
    assert calls[0] == calls[1]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part.get("arguments", "") for part in parts) == message["tool_calls"][0]["arguments"]
    await drained


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        ({"messages": "x"}, "messages", "must be a list, got a string"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a valid string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "'text'"),
        ({"messages": SAID, "tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"messages": SAID, "tools": [NOTE, NOTE]}, "tools", "a name of its own"),
        ({"messages": SAID, "tools": [NOTE], "tool_choice": "perhaps"}, "tool_choice", "'required'"),
        ({"messages": SAID, "tool_choice": "required"}, "tool_choice", "when tools are given"),
        ({"messages": SAID, "tools": [NOTE], "parallel_tool_calls": "no"}, "parallel_tool_calls", "a valid boolean"),
        ({"messages": SAID, "reasoning_effort": "some"}, "reasoning_effort", "'minimal'"),
        ({"messages": SAID, "chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
        ({"messages": SAID, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools", "field of its own"),
        ({"messages": SAID, "prompt": "x"}, "messages", "not both"),
        ({"messages": SAID, "prompt_ids": [1]}, "messages", "not both"),
        ({"prompt": "x", "tools": [NOTE]}, "tools", "when messages are given"),
        (
            {"messages": SAID, "tools": [NOTE], "grammar": {"form": "regex", "text": "a", "said": "grammar"}},
            "grammar",
            "with tools",
        ),
    ],
)
async def test_what_is_malformed_is_refused_by_name(
    fleet: FakeFleet, placement: PlacementLoop, producer: Producer, body: dict[str, Any], field: str, why: str
) -> None:
    await fleet.start("w0")
    await known(placement, "w0")
    (failed,) = await whole(producer, body)
    assert (failed["type"], failed["code"], failed["field"]) == ("failed", "invalid_request", field), failed
    assert why in failed["message"]


async def test_what_is_nested_too_deep_and_what_is_no_json(
    fleet: FakeFleet, placement: PlacementLoop, producer: Producer
) -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    bodies = [{"messages": SAID, "chat_template_kwargs": {"x": deep}}, {"messages": deep}]
    if not producer.as_json:
        bodies += [{"messages": [{"role": "user", "content": b"\xff"}]}, {"messages": SAID, "tools": float("nan")}]
    for body in bodies:
        (failed,) = await whole(producer, body)
        assert failed["code"] == "invalid_request"
        assert failed["field"] in body


async def test_an_old_workers_record_keeps_a_producers_chat_away(
    fleet: FakeFleet, placement: PlacementLoop, producer: Producer, client: Client
) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker)
    await known(placement, "w0", "w1")
    lease = fleet.workers["w0"].loop.parts.lease
    assert isinstance(lease.record, WorkerRecord)
    await lease.set(replace(lease.record, chats=False))
    views = placement.subscriptions.members.view.workers
    await until(lambda: not views["w0"].record.chats)
    for seed in range(6):
        frames = await told(producer, {"messages": [{"role": "user", "content": f"{seed}?"}], "max_tokens": 2})
        assert frames[0]["worker"] == "w1"
    await fleet.workers["w1"].stop()
    await known(placement, "w0")
    (failed,) = await whole(producer, {"messages": SAID})
    assert failed["code"] in ("no_workers", "unavailable")
    assert failed["retryable"]


async def test_a_message_too_long_for_nats_is_in_the_tokens_alone(
    fleet: FakeFleet,
    placement: PlacementLoop,
    producer: Producer,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fleet.start("w0")
    await known(placement, "w0")
    await ready(client, 1)
    monkeypatch.setattr("kvfleet.worker.streams.outbox.LARGEST_BATCH", 500)
    monkeypatch.setattr(type(client.connection), "max_payload", 2000)
    body = {"messages": SAID, "max_tokens": 1000, "temperature": 0}
    frames = await told(producer, body)
    assert frames[-1]["message"] == {"finish_reason": "length", "partial": True}
    text = "".join(text for frame in frames if frame["type"] == "tokens" for text in frame["text"])
    assert len(text) > 2000
    async with client.generate(Generation("demo", Sampling(1000, temperature=0.0), chat=chat_of(SAID))) as stream:
        events = [event async for event in stream]
    assert isinstance(events[-1], Finished)
    assert events[-1].message == AssistantMessage("length", partial=True)
    assert "".join(piece for event in events if isinstance(event, Tokens) for piece in event.text) == text


async def test_a_request_that_is_sent_again_has_its_message_again(
    fleet: FakeFleet, placement: PlacementLoop, producer: Producer
) -> None:
    await fleet.start("w0")
    await known(placement, "w0")
    first, again = [(await told(producer, {**ASKED, "request": "r1"}))[-1] for _ in range(2)]
    assert first == again
    (failed,) = await whole(producer, {**ASKED, "tool_choice": "auto", "request": "r1"})
    assert (failed["code"], failed["field"]) == ("invalid_request", "request"), "its tools are part of what is asked"


async def test_a_response_format_of_a_client(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    form = ResponseFormat(FormatType.JSON_SCHEMA, JsonSchema("note", PARAMETERS))
    asked = Generation("demo", SAMPLING, prompt="Hark.", response_format=form)
    jsonschema.validate(json.loads(await read_text(client.generate(asked))), PARAMETERS)
    (message,), _ = await read(client.generate(replace(asked, prompt=None, chat=chat_of(SAID))))
    jsonschema.validate(json.loads(message.content), PARAMETERS)
    with pytest.raises(InvalidRequest, match="not both"):
        client.generate(replace(asked, sampling=replace(SAMPLING, grammar=Grammar(GrammarForm.REGEX, "a"))))
    with pytest.raises(InvalidRequest) as refused:
        client.generate(replace(asked, response_format=ResponseFormat(FormatType.JSON_SCHEMA)))
    assert refused.value.field == "response_format.json_schema"
