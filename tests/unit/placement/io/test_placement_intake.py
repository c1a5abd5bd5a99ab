"""What arrives on placement's subjects: read, or refused with the field's name; never an exception."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_build import an_ask, finished

from kvfleet.placement.events import Fail, GenerateAsked, PlaceAsked
from kvfleet.placement.io.intake import is_inbox, read_answer, read_disconnect, read_generate, read_place
from kvproto import codec
from kvproto.errors import CodecError
from kvproto.ids import model_token
from kvproto.messages import Accepted, Encoding, Grammar, GrammarForm

PLACE = "kvf.place.acme.demo"
GENERATE = "kvf.generate.acme.demo"


def generate(data: bytes, *, as_json: bool = True, subject: str = GENERATE) -> GenerateAsked | Fail:
    return read_generate(subject, "_INBOX.x", data, as_json=as_json, new_request="fresh", new_seed=99, unix_ms=5)


def refused(body: dict[str, Any]) -> Fail:
    read = generate(json.dumps(body).encode())
    assert isinstance(read, Fail)
    assert read.failed.code in ("invalid_request", "malformed_message", "unknown_enum_value")
    assert not read.failed.retryable
    return read


class TestInboxes:
    @pytest.mark.parametrize("reply", ["_INBOX.abc", "_prd.public.x", "_ing.1.x"])
    def test_inboxes(self, reply: str) -> None:
        assert is_inbox(reply)

    @pytest.mark.parametrize(
        "reply",
        [
            "",
            "kvf.worker.w1.cancel",
            "$SYS.x",
            "_a.*",
            "_a.>",
            "_a..b",
            "_plc.p1.r1.0",
            "_wrk.w1.x",
            "_a b",
            "_" + "a" * 600,
        ],
    )
    def test_no_inboxes(self, reply: str) -> None:
        assert not is_inbox(reply)

    def test_no_stream_into_an_ingress(self) -> None:
        assert not is_inbox("_ing.1.b", of_producer=True)
        assert is_inbox("_prd.public.x", of_producer=True)


class TestPlace:
    def test_tenant_comes_from_the_subject(self) -> None:
        read = read_place(PLACE, "_INBOX.x", codec.encode(an_ask()))
        assert read == PlaceAsked("_INBOX.x", "acme", an_ask())

    def test_a_model_of_another_subject_is_refused(self) -> None:
        read = read_place(PLACE, "_INBOX.x", codec.encode(an_ask(model="other", attempt=2)))
        assert isinstance(read, Fail)
        assert (read.failed.field, read.failed.request, read.failed.attempt) == ("model", "r1", 2)
        assert read.encoding is Encoding.FRAMES

    def test_a_name_that_is_no_token_travels_hashed(self) -> None:
        token = model_token("org/model")
        read = read_place(f"kvf.place.acme.{token}", "_INBOX.x", codec.encode(an_ask(model="org/model")))
        assert isinstance(read, PlaceAsked)

    def test_an_illegal_tenant_is_refused(self) -> None:
        read = read_place("kvf.place.a%b.demo", "_INBOX.x", codec.encode(an_ask()))
        assert isinstance(read, Fail)
        assert read.failed.field == "tenant"

    @given(st.binary(max_size=200))
    def test_random_bytes(self, data: bytes) -> None:
        read_place(PLACE, "_INBOX.x", data)
        read_place(PLACE, "_INBOX.x", b"\x01" + data)


class TestGenerate:
    def test_json_and_msgpack_mean_the_same(self) -> None:
        body = {"prompt_ids": [1, 2], "max_tokens": 3, "request": "mine", "seed": 4}
        one, two = generate(json.dumps(body).encode()), generate(msgpack.packb(body), as_json=False)
        assert isinstance(one, GenerateAsked)
        assert isinstance(two, GenerateAsked)
        assert one.ask == two.ask
        assert (one.encoding, two.encoding) == (Encoding.JSON, Encoding.MSGPACK)
        assert (one.tenant, one.model_token, one.request, one.seed) == ("acme", "demo", "mine", 4)

    def test_a_response_format_is_a_grammar(self) -> None:
        said = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["ü"]}}}
        body = {"prompt": "x", "response_format": said}
        for read in (generate(json.dumps(body).encode()), generate(msgpack.packb(body), as_json=False)):
            assert isinstance(read, GenerateAsked)
            grammar = Grammar(GrammarForm.JSON_SCHEMA, '{"enum":["ü"]}', "response_format.json_schema.schema")
            assert read.ask.grammar == grammar

    def test_id_and_seed_are_given_where_absent(self) -> None:
        read = generate(b'{"prompt": "x"}')
        assert isinstance(read, GenerateAsked)
        assert (read.request, read.seed, read.unix_ms) == ("fresh", 99, 5)

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({}, "prompt"),
            ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
            ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            (
                {"prompt": "x", "response_format": {"type": "json_object"}, "grammar": {"form": "json_object"}},
                "grammar",
            ),
            ({"prompt": "x", "grammar": {"form": "json", "text": "{}"}}, "grammar.form"),
            ({"prompt": ""}, "prompt"),
            ({"prompt_ids": []}, "prompt"),
            ({"prompt": "x", "prompt_ids": [1]}, "prompt"),
            ({"prompt": 3}, "prompt"),
            ({"prompt_ids": [-1]}, "prompt_ids[0]"),
            ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "x", "max_tokens": 10**9}, "max_tokens"),
            ({"prompt": "x", "temperature": -1}, "temperature"),
            ({"prompt": "x", "top_p": 2}, "top_p"),
            ({"prompt": "x", "request": "a.b"}, "request"),
            ({"prompt": "x", "request": ""}, "request"),
            ({"prompt": "x", "model": "other"}, "model"),
        ],
    )
    def test_a_bad_field_is_named(self, body: dict[str, Any], field: str) -> None:
        assert refused(body).failed.field == field

    def test_refusals_are_answered_in_kind(self) -> None:
        assert refused({"prompt": "", "request": "mine"}).encoding is Encoding.JSON
        assert refused({"prompt": "", "request": "mine"}).failed.request == "mine"
        read = generate(b"\xc1", as_json=False)
        assert isinstance(read, Fail)
        assert read.encoding is Encoding.MSGPACK

    @given(st.binary(max_size=200), st.booleans())
    def test_random_bytes(self, data: bytes, as_json: bool) -> None:
        generate(data, as_json=as_json)

    @given(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["prompt", "stop", "seed", "x"]), x),
            max_leaves=8,
        )
    )
    def test_random_json(self, value: Any) -> None:
        generate(json.dumps(value).encode())


class TestAnswers:
    @pytest.mark.parametrize("frame", [Accepted("r", 0, "w", "e"), finished("r", 0)])
    def test_in_any_encoding(self, frame: Any) -> None:
        assert read_answer(codec.encode_frames([frame])) == [frame]
        assert read_answer(codec.encode_plain_frame(frame, as_json=True)) == [frame]
        assert read_answer(codec.encode_plain_frame(frame, as_json=False)) == [frame]

    @given(st.sampled_from([b"", b"{", b'{"type":', b"\x01\x91", b"\x81\xa4type"]), st.binary(max_size=60))
    def test_random_bytes(self, start: bytes, rest: bytes) -> None:
        try:
            read_answer(start + rest)
        except CodecError:
            pass

    def test_a_type_that_is_no_text(self) -> None:
        with pytest.raises(CodecError):
            read_answer(b'{"type": []}')


class TestDisconnects:
    def test_workers_are_known_by_their_connections_name(self) -> None:
        assert read_disconnect(json.dumps({"client": {"name": "worker-w-1"}}).encode()) == "w-1"

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"[]",
            b"{}",
            b'{"client": 3}',
            b'{"client": {"name": 3}}',
            b'{"client": {"name": "ingress-1"}}',
            b'{"client": {"name": "worker-a.b"}}',
        ],
    )
    def test_others_are_not(self, data: bytes) -> None:
        assert read_disconnect(data) is None


class TestChats:
    @pytest.mark.parametrize("as_json", [True, False])
    def test_a_chat_is_one_text_for_the_worker(self, as_json: bool) -> None:
        body = {"messages": [{"role": "user", "content": "Hellö"}], "tools": [{"x": [1]}], "tool_choice": "auto"}
        data = json.dumps(body).encode() if as_json else msgpack.packb(body)
        read = read_generate(
            GENERATE, "_INBOX.x", data, as_json=as_json, new_request="r", new_seed=9, unix_ms=1_763_700_000_999
        )
        assert isinstance(read, GenerateAsked)
        assert read.chat is not None
        assert json.loads(read.chat.text) == body
        assert read.chat.unix_s == 1_763_700_000
        assert read.chat.conversation.startswith("chat-")

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"messages": [], "prompt": "x"}, "messages"),
            ({"messages": [], "prompt_ids": [1]}, "messages"),
            ({"prompt": "x", "tool_choice": "none"}, "tool_choice"),
            ({"tools": []}, "tools"),
            ({"prompt": "x", "reasoning_effort": "low"}, "reasoning_effort"),
        ],
    )
    def test_what_does_not_go_together(self, body: dict[str, Any], field: str) -> None:
        assert refused(body).failed.field == field

    def test_bytes_are_no_json(self) -> None:
        read = generate(msgpack.packb({"messages": [{"role": "user", "content": b"\xff"}]}), as_json=False)
        assert isinstance(read, Fail)
        assert (read.failed.code, read.failed.field) == ("invalid_request", "messages")
