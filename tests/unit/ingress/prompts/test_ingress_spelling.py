"""What a token is by itself, for tokenizers of each kind: its true bytes, and a text for them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_build import demo_bundle, demo_tokenizer, sent
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvfleet.ingress.answers.openai_answers import chat_logprobs, completion_logprobs
from kvfleet.ingress.prompts.tokenizer import ModelTokenizer, TokenSpelling, byte_of_character
from kvproto.messages import TokenLogprobs


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=100, deadline=None)
def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.spelling.bytes_of(token) for token in ids) == text.encode()


def test_a_part_of_a_character_is_spelled_as_bytes() -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1, "the demo vocabulary is too small for it"
    spelled = [tokenizer.spelling.text_of(token) for token in ids]
    assert spelled[0].startswith("bytes:\\xf0")
    assert tokenizer.spelling.text_of(ids[0]) is spelled[0], "made once"


def test_special_tokens_are_spelled_as_they_are() -> None:
    tokenizer = demo_tokenizer()
    (token,) = tokenizer.encode("<|end|>", add_special_tokens=False)
    assert tokenizer.spelling.bytes_of(token) == b"<|end|>"


def spelling_of(tokenizer: Tokenizer) -> TokenSpelling:
    return ModelTokenizer(replace(demo_bundle(), tokenizer_json=tokenizer.to_str())).spelling


def model_of(*tokens: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token=tokens[0]))


SENTENCE_PIECE = [
    decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    decoders.Metaspace(),
]


@pytest.mark.parametrize("decoder", SENTENCE_PIECE, ids=["llama", "metaspace"])
def test_the_mark_for_a_space_is_a_space(decoder: Any) -> None:
    tokenizer = model_of("?", "\u2581the", "ly", "<0xE2>")
    tokenizer.decoder = decoder
    spelling = spelling_of(tokenizer)
    assert [spelling.bytes_of(token) for token in (1, 2)] == [b" the", b"ly"]
    assert spelling.bytes_of(3) == (b"\xe2" if decoder is SENTENCE_PIECE[0] else b"<0xE2>")


def test_any_other_tokenizer_is_asked_to_decode() -> None:
    tokenizer = model_of("?", "the")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert spelling_of(tokenizer).bytes_of(1) == b"the"


def test_an_id_that_has_no_token_is_nothing() -> None:
    """A model's head may be wider than its vocabulary."""
    assert demo_tokenizer().spelling.bytes_of(10**6) == b""


def test_the_alphabet_is_gpt2s() -> None:
    alphabet = byte_of_character()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["a"], alphabet["Ġ"], alphabet["Ċ"]) == (ord("a"), ord(" "), ord("\n"))


def test_openais_two_forms() -> None:
    spelling = demo_tokenizer().spelling
    ids = demo_tokenizer().encode("Hello 🙂", add_special_tokens=False)
    scores = [TokenLogprobs(-0.5, (ids[0], 7), (-0.5, -1.5)), *(TokenLogprobs(float("-inf")) for _ in ids[1:])]
    content = sent(chat_logprobs(spelling, ids, scores))["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "Hello 🙂"
    assert content[0] == {
        "token": spelling.text_of(ids[0]),
        "logprob": -0.5,
        "bytes": list(spelling.bytes_of(ids[0])),
        "top_logprobs": [
            {"token": spelling.text_of(one), "logprob": value, "bytes": list(spelling.bytes_of(one))}
            for one, value in ((ids[0], -0.5), (7, -1.5))
        ],
    }
    assert content[1]["logprob"] == -9999.0
    json.dumps(content, allow_nan=False)
    pieces = ["Hello", *[""] * (len(ids) - 2), " 🙂"]
    lists = sent(completion_logprobs(spelling, ids, pieces, scores, offset=3))
    assert lists["text_offset"] == [3, *[8] * (len(ids) - 1)]
    assert lists["tokens"] == [one["token"] for one in content]
    assert lists["token_logprobs"][0] == -0.5
    assert lists["top_logprobs"][0] == {spelling.text_of(ids[0]): -0.5, spelling.text_of(7): -1.5}
    assert lists["top_logprobs"][1] == {spelling.text_of(ids[1]): -9999.0}, "the token itself, beside no others"
