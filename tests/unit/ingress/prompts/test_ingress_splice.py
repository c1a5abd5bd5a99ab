"""Splicing: the ids of earlier turns come back, and always stand for exactly the text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_build import demo_model, demo_tokenizer

from kvfleet.ingress.prompts.chat_splice import STRIDE, SpliceIndex, join, match_history
from kvfleet.ingress.prompts.prompts import scope_of

TOKENIZER = demo_tokenizer()
SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]
PIECES = st.sampled_from(["a", "the ", "\n", " é", "日本", "🙂", "word word ", "x" * 90, "it's ", *SPECIAL])
TEXT = st.lists(PIECES, max_size=12).map("".join)
IDS = st.lists(st.integers(6, 1023), min_size=1, max_size=30)


def chat_text(*turns: str) -> str:
    return TOKENIZER.render(
        [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(turns)]
    )


def encode(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(st.lists(st.tuples(TEXT, IDS), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_growing_chat_keeps_every_id_it_ever_generated(turns: list[tuple[str, list[int]]]) -> None:
    index = SpliceIndex(10**7)
    text, history = "<|bos|>", (0,)
    for n, (said, generated) in enumerate(turns):
        text += f"<|user|>{said}<|end|><|assistant|>"
        splice = index.find("s", text, TOKENIZER)
        assert (splice is not None) == (n > 0)
        ids = join(splice, text, TOKENIZER) if splice else encode(text)
        assert ids is not None
        assert TOKENIZER.decode(ids) == text
        if splice is not None:
            assert ids[: len(history)] == history
        index.remember("s", text, ids, generated, TOKENIZER)
        history = (*ids, *generated)
        text = TOKENIZER.decode(history) + "<|end|>"
        index.check_integrity()


@given(st.lists(st.tuples(TEXT, IDS), max_size=8), TEXT, st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_whatever_is_spliced_decodes_to_the_text(known: list[tuple[str, list[int]]], tail: str, cut: int) -> None:
    """Prompts that start alike, generations cut anywhere, texts that diverge anywhere."""
    index = SpliceIndex(10**6)
    texts = []
    for prompt, generated in known:
        ids = encode(prompt)
        if ids:
            index.remember("s", prompt, ids, generated, TOKENIZER)
            texts.append(TOKENIZER.decode([*ids, *generated]))
        index.check_integrity()
    for text in [*(text[:cut] + tail for text in texts), tail]:
        splice = index.find("s", text, TOKENIZER)
        if splice is None:
            continue
        assert text.startswith(TOKENIZER.decode(splice.ids))
        assert len(TOKENIZER.decode(splice.ids)) == splice.chars
        ids = join(splice, text, TOKENIZER)
        assert ids is None or TOKENIZER.decode(ids) == text


@given(IDS, TEXT, st.integers(0, 100))
@settings(max_examples=150, deadline=None)
def test_a_sessions_history_serves_a_text_that_starts_with_it(ids: list[int], tail: str, cut: int) -> None:
    text = TOKENIZER.decode(ids)[:cut] + tail
    splice = match_history(ids, text, TOKENIZER)
    if splice is not None:
        assert text.startswith(TOKENIZER.decode(splice.ids))
        assert splice.chars == len(TOKENIZER.decode(splice.ids))
    whole = match_history(ids, TOKENIZER.decode(ids) + tail, TOKENIZER)
    assert whole is not None
    assert whole.ids == tuple(ids)


def test_a_stop_string_and_trimmed_space_still_find_the_turn() -> None:
    """The caller saw less than was generated: the ids up to what it saw are spliced."""
    index = SpliceIndex(10**6)
    prompt = chat_text("Speak.")
    generated = [*(TOKENIZER.encode("Hello", add_special_tokens=False)), *encode(" STOP")]
    index.remember("s", prompt, encode(prompt), generated, TOKENIZER)
    splice = index.find("s", chat_text("Speak.", "Hello", "More."), TOKENIZER)
    assert splice is not None
    assert splice.ids == (*encode(prompt), *encode("Hello"))


def test_text_that_diverges_inside_words_is_tokenised_anew_from_the_last_mark() -> None:
    index = SpliceIndex(10**6)
    prompt = chat_text("Speak.")
    index.remember("s", prompt, encode(prompt), encode("Hello there"), TOKENIZER)
    edited = chat_text("Speak.", "Hello themes", "More.")
    splice = index.find("s", edited, TOKENIZER)
    assert splice is not None
    assert splice.ids == encode(prompt)
    assert join(splice, edited, TOKENIZER) == encode(edited)


def test_of_several_answers_to_one_prompt_the_right_one_is_found() -> None:
    index = SpliceIndex(10**6)
    prompt = chat_text("Choose.")
    for answer in ("red", "green", "blue", "grey", "gold"):
        index.remember("s", prompt, encode(prompt), encode(answer), TOKENIZER)
    index.remember("s", prompt, encode(prompt), encode("gold"), TOKENIZER)
    assert len(index) == 4
    for answer in ("blue", "gold"):
        splice = index.find("s", chat_text("Choose.", answer, "Why?"), TOKENIZER)
        assert splice is not None
        assert splice.ids == (*encode(prompt), *encode(answer))
    again = index.find("s", prompt, TOKENIZER)
    assert again is not None
    assert again.ids == encode(prompt)


def test_scopes_never_meet() -> None:
    index = SpliceIndex(10**6)
    prompt = chat_text("Mine.")
    index.remember("a", prompt, encode(prompt), [9], TOKENIZER)
    assert index.find("b", prompt, TOKENIZER) is None
    assert (index.hits_total, index.misses_total) == (0, 1)


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    index = SpliceIndex(20_000)
    prompts = [chat_text(f"{n} " + "word " * 40) for n in range(30)]
    for prompt in prompts:
        index.remember("s", prompt, encode(prompt), [9, 10], TOKENIZER)
        index.find("s", prompts[0], TOKENIZER)
        index.check_integrity()
    assert index.find("s", prompts[0], TOKENIZER) is not None
    assert index.find("s", prompts[1], TOKENIZER) is None
    assert index.find("s", prompts[29], TOKENIZER) is not None
    huge = "word " * 20_000
    index.remember("s", huge, encode(huge), [9], TOKENIZER)
    assert index.find("s", huge, TOKENIZER) is None


def test_a_look_up_does_not_visit_the_entries() -> None:
    """Among many prompts that begin alike, few candidates are tried: only the lengths of tails count."""
    index = SpliceIndex(10**8)
    system = "You are a poet. " * (STRIDE // 16 + 1)
    for n in range(2000):
        index.remember("s", system + f"{n:05d}", (1, n), [9], TOKENIZER)
    found = index._candidates("s", system + "01234" + "and so on")
    assert len(found) == 1


def test_the_scope_of_a_prompt_is_tenant_model_and_tokenizer() -> None:
    model = demo_model()
    assert scope_of(model, "a") != scope_of(model, "b")
    assert "hash" in scope_of(model, "a")
