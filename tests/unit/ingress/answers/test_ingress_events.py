"""Events as bytes: valid JSON whatever a model writes, one write per read, and nothing left running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_build import demo_tokenizer

from kvfleet.ingress.answers.native_events import NativeForm
from kvfleet.ingress.answers.openai_events import OpenAiForm
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.http.sse import complete, gather, relay
from kvfleet.ingress.limits.admission import RunMemory
from kvfleet.ingress.prompts.tokenizer import TokenSpelling
from kvfleet.ingress.runs.event_ids import START, Position
from kvfleet.ingress.runs.jobs import Form, HeldTurn, Job
from kvfleet.ingress.runs.runs import Run
from kvfleet.ingress.runs.transcript import ChoiceTranscript, Transcript
from kvproto.errors import KvfleetError, WorkerLost
from kvproto.messages import ChoiceFinished, Finished, FinishReason, Sampling, Started, TokenLogprobs, Tokens
from kvproto.streams.generation import Generation

HOSTILE = st.text() | st.sampled_from(['"}', "\\", "\n\ndata: [DONE]\n\n", "\x00text\x00", "\u2028", "🙂", "\r"])
STARTED = Started("r", 0, "w1", 7, {"device": 5, "host": 1}, 0.25)
FINISHED = Finished("r", 0, FinishReason.STOP, 7, 3, 6, "w1")


def data_of(raw: bytes) -> list[Any]:
    """Events by the letter of the standard: blocks between blank lines, of a `data:` line, an `id:` line where there
    are any, and comments."""
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    values = []
    for block in blocks:
        *id_lines, data = [line for line in block.split("\n") if not line.startswith(":")]
        assert all(line.startswith("id: r:") for line in id_lines)
        assert len(id_lines) <= 1
        assert data.startswith("data: ")
        values.append(data.removeprefix("data: "))
    return values


@given(
    model=HOSTILE, pieces=st.lists(HOSTILE, max_size=6), chat=st.booleans(), usage=st.booleans(), id_lines=st.booleans()
)
def test_openai_chunks_are_json_whatever_the_text(
    model: str, pieces: list[str], chat: bool, usage: bool, id_lines: bool
) -> None:
    form = OpenAiForm("r", model, 5, "fp", chat, include_usage=usage)
    writer = form.writer(id_lines=id_lines)
    choice = ChoiceTranscript(pieces, list(range(len(pieces))), reason=FinishReason.STOP)
    transcript = Transcript(started=STARTED, finished=FINISHED, choices=[choice])
    out: list[bytes] = []
    writer.started(transcript, out)
    writer.tokens(0, choice, 0, out)
    writer.finished(FINISHED, transcript, out)
    raw = b"".join(out)
    *events, last = data_of(raw)
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    ids = [chunk["kvfleet"]["event_id"] for chunk in chunks]
    begun = ["0"] if chat else []
    places = [str(at + 1) for at, piece in enumerate(pieces) if piece]
    assert ids == [f"r:{place}" for place in (*begun, *places, "end", *(["end.1"] if usage else []))]
    said = [line[4:].decode() for line in raw.split(b"\n") if line.startswith(b"id: ")]
    assert said[:-1] == (ids if id_lines else [])
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    texts = [c["delta"].get("content", "") if chat else c["text"] for c in choices]
    assert "".join(texts) == "".join(pieces)
    assert all(chunk["model"] == model for chunk in chunks)
    assert choices[-1]["finish_reason"] == "stop"
    if usage:
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    body = json.loads(form.body(transcript))
    choice = body["choices"][0]
    assert (choice["message"]["content"] if chat else choice["text"]) == "".join(pieces)
    assert body["usage"]["total_tokens"] == 10


@given(seq_id=HOSTILE, prompt=HOSTILE, pieces=st.lists(HOSTILE, max_size=6))
def test_native_events_are_json_whatever_the_text(seq_id: str, prompt: str, pieces: list[str]) -> None:
    writer = NativeForm("r", seq_id, prompt).writer()
    said = ChoiceTranscript(pieces, list(range(len(pieces))))
    out: list[bytes] = []
    writer.started(Transcript(started=STARTED), out)
    writer.tokens(0, said, 0, out)
    writer.finished(FINISHED, Transcript(started=STARTED, choices=[said]), out)
    start, *tokens, done = [json.loads(event) for event in data_of(b"".join(out))]
    assert (start["seq_id"], start["prompt"], start["cached_tokens"]) == (seq_id, prompt, 6)
    assert tokens == [{"type": "token", "token": piece, "token_id": i} for i, piece in enumerate(pieces)]
    assert done["generated_text"] == prompt + "".join(pieces)


class ScriptedStream:
    """What a run needs of a stream: batches, then an error or the end."""

    accepted = True

    def __init__(self, batches: Sequence[Any], *, endless: bool = False) -> None:
        self._batches = list(batches)
        self._endless = endless
        self.cancelled = asyncio.Event()
        self.worker = "w1"

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if self._batches:
            batch = self._batches.pop(0)
            if isinstance(batch, KvfleetError):
                raise batch
            return batch
        if self._endless:
            await self.cancelled.wait()
            raise KvfleetError("cancelled")
        return []

    async def cancel(self, received: Sequence[int] | None = None) -> None:
        self.cancelled.set()


class Wire:
    """An ASGI server's ends: what was sent, and a client that leaves when told."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.exchange = Exchange({"type": "http", "headers": []}, self._receive, self._send, "r")

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def run_of(stream: ScriptedStream, form: Form, wire: Wire, choices: int = 1) -> Run:
    """What the request flow makes of a request, with `wire` as its only reader."""

    async def prepare() -> Job:
        return Job(Generation("m", Sampling(max_tokens=9, n=choices), (1,)), form, HeldTurn())

    run = Run("t", "r", b"", False, prepare, lambda generation, before: stream, RunMemory())
    run.readers.add(wire.exchange)
    return run


async def carry(
    wire: Wire,
    stream: ScriptedStream,
    form: Form | None = None,
    at: Position = START,
    keepalive_s: float = 60.0,
    n: int = 1,
    id_lines: bool = True,
) -> Run:
    """As a route and the application around it do."""
    run = run_of(stream, form or NativeForm("r", "s", "p"), wire, n)
    try:
        last = await relay(wire.exchange, run, at, id_lines=id_lines, keepalive_s=keepalive_s)
        assert not wire.exchange.ended  # so that a commit may still fail
        await complete(wire.exchange, run.transcript, last)
    except KvfleetError as error:
        if not wire.exchange.gone:
            await wire.exchange.refuse(error)
        raise
    return run


def tokens(index: int, *pieces: str) -> Tokens:
    return Tokens("r", 0, 0, index, tuple(range(index, index + len(pieces))), pieces)


async def test_everything_that_was_read_is_one_send() -> None:
    wire = Wire()
    stream = ScriptedStream([[STARTED], [tokens(0, "a"), tokens(1, "b", "c")], [tokens(3, "d"), FINISHED]])
    transcript = (await carry(wire, stream)).transcript
    assert transcript.choices[0].text == "abcd"
    assert transcript.ids == (0, 1, 2, 3)
    assert len(wire.sent) == 1 + 3  # head, and one send per read
    assert [message.get("more_body") for message in wire.sent[1:]] == [True, True, False]
    assert (b"x-kvfleet-cached-tokens", b"6") in wire.sent[0]["headers"]
    assert [json.loads(one)["type"] for one in data_of(wire.body)] == ["start", *["token"] * 4, "done"]
    assert len(asyncio.all_tasks()) == 1


async def test_errors_before_and_after_the_first_byte() -> None:
    wire = Wire()
    with pytest.raises(WorkerLost):
        await carry(wire, ScriptedStream([WorkerLost("gone")]))
    assert wire.sent[0]["status"] == 503
    assert json.loads(wire.body)["error"]["code"] == "worker_lost"
    wire = Wire()
    with pytest.raises(WorkerLost):
        await carry(wire, ScriptedStream([[STARTED], WorkerLost("gone")]))
    assert json.loads(data_of(wire.body)[-1]) == {"type": "error", "error": "gone", "code": "worker_lost"}
    assert wire.sent[-1]["more_body"] is False


async def test_a_client_that_leaves_cancels_the_stream() -> None:
    wire = Wire()
    stream = ScriptedStream([[STARTED]], endless=True)
    running = asyncio.create_task(carry(wire, stream))
    await asyncio.sleep(0.01)
    wire.left.set()
    with pytest.raises(KvfleetError):
        await running
    assert stream.cancelled.is_set()
    assert wire.exchange.gone
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("id_lines", [False, True])
async def test_comments_while_nothing_comes(id_lines: bool) -> None:
    wire = Wire()
    stream = ScriptedStream([], endless=True)
    form = OpenAiForm("r", "m", 5, "fp", True)
    running = asyncio.create_task(carry(wire, stream, form, keepalive_s=0.01, id_lines=id_lines))
    while wire.body.count(b": waiting") < 2:
        await asyncio.sleep(0.005)
    end = b"\n" if id_lines else b"\n\n"
    assert wire.body.startswith(b": queued%b: waiting%b: waiting%b" % (end, end, end))
    stream.cancelled.set()
    with pytest.raises(KvfleetError):
        await running
    assert b'data: {"error":' in wire.body  # the status had been sent


# ---------------------------------------------------------------------------------------------- several choices


def of(choice: int, index: int, *pieces: str) -> Tokens:
    ids = tuple(range(index, index + len(pieces)))
    scores = tuple(TokenLogprobs(-1.0 - one, (one, 9), (-1.0 - one, float("-inf"))) for one in ids)
    return Tokens("r", 0, choice, index, ids, pieces, scores)


ENDS = [ChoiceFinished("r", 0, 1, FinishReason.LENGTH, 1), ChoiceFinished("r", 0, 0, FinishReason.STOP, 2)]
BATCHES = [[STARTED, of(0, 0, "a")], [of(1, 0, "x"), ENDS[0]], [of(0, 1, "b"), ENDS[1], FINISHED]]


async def chunks_of(*, chat: bool, spelling: TokenSpelling | None = None) -> list[Any]:
    wire = Wire()
    form = OpenAiForm("r", "m", 5, "fp", chat, 2, spelling, include_usage=True)
    transcript = (await carry(wire, ScriptedStream(BATCHES), form, n=2)).transcript
    assert [choice.text for choice in transcript.choices] == ["ab", "x"]
    assert [choice.ids for choice in transcript.choices] == [[0, 1], [0]]
    *events, done = data_of(wire.body)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


async def test_choices_stream_side_by_side_and_end_one_by_one() -> None:
    *chunks, usage = await chunks_of(chat=True)
    ((first,), (second,), *others) = [chunk["choices"] for chunk in chunks]
    assert [first["index"], second["index"]] == [0, 1]
    assert first["delta"] == second["delta"] == {"role": "assistant", "content": ""}
    said = [(c["index"], c["delta"].get("content"), c["finish_reason"]) for (c,) in others]
    assert said == [(0, "a", None), (1, "x", None), (1, None, "length"), (0, "b", None), (0, None, "stop")]
    assert [("worker_id" in chunk["kvfleet"]) for chunk in chunks] == [False] * 6 + [True]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3


async def test_every_scored_token_is_a_chunk_with_its_logprobs() -> None:
    spelling = demo_tokenizer().spelling
    chunks = await chunks_of(chat=False, spelling=spelling)
    scored = [c for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [(c["index"], c["text"], c["logprobs"]["text_offset"]) for c in scored] == [
        (0, "a", [0]), (1, "x", [0]), (0, "b", [1])
    ]  # fmt: skip
    assert scored[2]["logprobs"]["tokens"] == [spelling.text_of(1)]
    assert scored[2]["logprobs"]["token_logprobs"] == [-2.0]
    assert scored[2]["logprobs"]["top_logprobs"] == [{spelling.text_of(1): -2.0, spelling.text_of(9): -9999.0}]
    chat = [c["logprobs"]["content"] for chunk in await chunks_of(chat=True, spelling=spelling)
            for c in chunk["choices"] if c["logprobs"]]  # fmt: skip
    assert [[one["logprob"] for one in content] for content in chat] == [[-1.0], [-1.0], [-2.0]]


async def test_a_whole_answer_has_all_choices_and_their_logprobs() -> None:
    wire = Wire()
    form = OpenAiForm("r", "m", 5, "fp", True, 2, demo_tokenizer().spelling)
    run = run_of(ScriptedStream(BATCHES), form, wire, 2)
    await gather(wire.exchange, run)
    first, second = json.loads(form.body(run.transcript))["choices"]
    assert (first["index"], first["message"]["content"], first["finish_reason"]) == (0, "ab", "stop")
    assert (second["index"], second["message"]["content"], second["finish_reason"]) == (1, "x", "length")
    assert [one["logprob"] for one in first["logprobs"]["content"]] == [-1.0, -2.0]
    assert len(second["logprobs"]["content"]) == 1


def test_a_native_event_has_the_logprobs_of_its_token() -> None:
    spelling = demo_tokenizer().spelling
    out: list[bytes] = []
    said = ChoiceTranscript(["", "a"], [4, 5], [*of(0, 4, "", "a").logprobs])
    NativeForm("r", "s", "p", spelling).writer().tokens(0, said, 1, out)
    NativeForm("r", "s", "p").writer().tokens(0, said, 1, out)
    scored, plain = [json.loads(event) for event in data_of(b"".join(out))]
    assert plain == {"type": "token", "token": "a", "token_id": 5}
    assert scored == plain | {
        "logprob": -6.0,
        "top_logprobs": [
            {"token": spelling.text_of(5), "token_id": 5, "logprob": -6.0},
            {"token": spelling.text_of(9), "token_id": 9, "logprob": -9999.0},
        ],
    }
