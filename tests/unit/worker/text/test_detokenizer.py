"""Pieces of text, id by id, add up to decoding all ids at once."""

from __future__ import annotations

from engine_rig import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvfleet.worker.text.detokenizer import Detokenizer
from tests.support.id_detokenizer import IdDetokenizer


def byte_level() -> Tokenizer:
    """All bytes, some merges, one special token (id 0)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©")]
    vocab = {"<s>": 0} | {token: at for at, token in enumerate([*letters, *(a + b for a, b in merges)], 1)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: words begin with ▁, unknown characters become bytes, a leading space is dropped."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "▁cat", "a", "b"]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = Detokenizer(byte_level()), Detokenizer(byte_fallback())


def pieces_of(detokenizer: Detokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = detokenizer.stream(prompt or [])
    pieces = [stream.push(token) for token in ids]
    pieces.append(stream.flush())
    assert not stream.pending
    return pieces


@settings(relaxed, max_examples=300)
@given(st.lists(st.integers(0, 260), max_size=60))
def test_byte_level_any_ids_even_invalid_utf8(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@settings(relaxed, max_examples=200)
@given(
    st.lists(
        st.one_of(st.sampled_from(["▁", "▁the", "the", "▁cat", "a", "<s>"]), st.characters(codec="utf-8")), max_size=30
    )
)
def test_byte_fallback_of_valid_text(words: list[str]) -> None:
    tokenizer = byte_fallback()
    ids = []
    for word in words:
        known = tokenizer.token_to_id(word)
        ids += [known] if known is not None else [2 + byte for byte in word.encode()]
    pieces = pieces_of(BYTE_FALLBACK, ids)
    assert "".join(pieces) == BYTE_FALLBACK.decode(ids)


def test_multi_byte_character_leaves_when_complete() -> None:
    ids = byte_level().encode("a😀b").ids
    assert pieces_of(BYTE_LEVEL, ids) == ["a", "", "", "", "😀", "b", ""]


def test_incomplete_character_is_flushed() -> None:
    ids = byte_level().encode("a😀").ids[:-1]
    assert pieces_of(BYTE_LEVEL, ids) == ["a", "", "", "", "\ufffd"]


def test_endless_invalid_bytes_do_not_pile_up() -> None:
    stream = BYTE_LEVEL.stream([])
    token = byte_level().token_to_id("ÿ")  # byte 0xff
    text = "".join(stream.push(token) for _ in range(1000))
    assert len(text) > 980
    assert len(text + stream.flush()) == 1000


def test_continuation_of_a_prompt_keeps_its_leading_space() -> None:
    tokenizer = byte_fallback()
    the, cat = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("▁cat")
    assert "".join(pieces_of(BYTE_FALLBACK, [cat, cat])) == "cat cat"
    assert "".join(pieces_of(BYTE_FALLBACK, [cat, cat], prompt=[1, the])) == " cat cat"


def test_prompt_that_ends_within_a_character() -> None:
    emoji = byte_level().encode("😀").ids
    assert "".join(pieces_of(BYTE_LEVEL, [*emoji[2:], *emoji], prompt=emoji[:2])).endswith("😀")


def test_ids_as_text() -> None:
    stream = IdDetokenizer().stream([1])
    assert stream.push(7) + stream.push(12) + stream.flush() == "7 12 "


@settings(relaxed, max_examples=400)
@given(
    st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]),
    st.lists(st.integers(0, 260), max_size=5),
    st.lists(st.integers(0, 260), max_size=40),
    st.integers(0, 40),
)
def test_skipping_is_pushing(detokenizer: Detokenizer, prompt: list[int], ids: list[int], cut: int) -> None:
    """Whatever comes after, the text of all is the same, where the first ids do not end within a character."""
    one, other = detokenizer.stream(prompt), detokenizer.stream(prompt)
    head, tail = ids[:cut], ids[cut:]
    skipped = one.skip(head)
    pushed = "".join(map(other.push, head))
    if skipped is None:
        assert "".join(map(one.push, head)) == pushed, "nothing has happened"
        skipped = pushed
    else:
        assert skipped == pushed
        assert not one.pending
    for token in tail:
        skipped += one.push(token)
        pushed += other.push(token)
    assert skipped + one.flush() == pushed + other.flush()
