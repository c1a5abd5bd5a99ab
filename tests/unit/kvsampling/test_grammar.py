"""Which tokens a grammar allows next, of a tokenizer with special tokens and a model with more logits than words."""

from __future__ import annotations

import json
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvproto.errors import InvalidRequest
from kvproto.messages import Grammar, GrammarForm
from kvsampling import grammar
from kvsampling.grammar import Grammars, Matcher

TEXT = (DEMO_FOLDER / "tokenizer.json").read_text()
WORDS = Tokenizer.from_str(TEXT)
PADDED = WORDS.get_vocab_size() + 100
END = 2


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: TEXT, PADDED, [END])


def spoken(matcher: Matcher, seed: int = 0, longest: int = 200, words: Tokenizer = WORDS, end: int = END) -> list[int]:
    """Tokens drawn alike of those that are allowed, to the end token."""
    chance, outputs = Random(seed), list[int]()
    while len(outputs) < longest:
        allowed = matcher.mask(outputs).nonzero()[0].tolist()
        assert allowed
        assert max(allowed) < words.get_vocab_size(), "padding is no word"
        token = chance.choice(allowed)
        if token == end:
            return outputs
        outputs.append(token)
    raise AssertionError(words.decode(outputs))


@pytest.mark.parametrize("said", ["日本 🙂", "ñandú \u200d", "<|end|><|user|>", 'a "quoted\\ one'])
def test_any_text_can_be_said_and_no_special_token_says_it(grammars: Grammars, said: str) -> None:
    outputs = spoken(Matcher(grammars, Grammar(GrammarForm.JSON_SCHEMA, json.dumps({"const": said}))))
    assert json.loads(WORDS.decode(outputs, skip_special_tokens=True)) == said
    assert not set(outputs) & WORDS.get_added_tokens_decoder().keys()


def of_pieces() -> Tokenizer:
    """As Llama 2 and Gemma have them: words begin with a mark, and what is no piece is told by its bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [*map(chr, range(33, 127)), "\u2581t", "he", "\u2581the"]
    words = {piece: token for token, piece in enumerate(pieces)}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    made = Tokenizer(models.BPE(words, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.normalizer = normalizers.Replace(" ", "\u2581")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return made


@pytest.mark.parametrize("said", ["the king <s> rode", "日本 🙂 é"])
def test_pieces_and_bytes(said: str) -> None:
    words = of_pieces()
    grammars = Grammars(words.to_str, words.get_vocab_size() + 50, [2])
    grammar = Grammar(GrammarForm.JSON_SCHEMA, json.dumps({"const": said}))
    outputs = spoken(Matcher(grammars, grammar), words=words, end=2)
    assert json.loads(words.decode(outputs)) == said


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    words = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0)], 0))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    with pytest.raises(InvalidRequest, match="the model's tokenizer") as refused:
        Grammars(words.to_str, 2, [0]).compile(Grammar(GrammarForm.REGEX, "a", "guided_regex"))
    assert refused.value.field == "guided_regex"


def test_a_character_of_several_tokens_is_ended(grammars: Grammars) -> None:
    matcher = Matcher(grammars, Grammar(GrammarForm.REGEX, "[一-龥]{3}"))
    for seed in range(5):
        text = WORDS.decode(spoken(Matcher(grammars, Grammar(GrammarForm.REGEX, "[一-龥]{3}")), seed))
        assert len(text) == 3
        assert all("一" <= one <= "龥" for one in text)
    first = matcher.mask([]).nonzero()[0][0]
    assert not matcher.mask([first])[END]


def test_blanks_come_to_an_end(grammars: Grammars) -> None:
    matcher = Matcher(grammars, Grammar(GrammarForm.JSON_SCHEMA, '{"type": "object"}'))
    outputs, blank = [WORDS.token_to_id("{")], WORDS.token_to_id("Ġ")
    while matcher.mask(outputs)[blank]:
        outputs.append(blank)
    assert len(outputs) == 1 + grammar.MOST_BLANKS
    assert matcher.mask(outputs)[WORDS.token_to_id("}")]


def test_blanks_that_must_be_are(grammars: Grammars) -> None:
    outputs = spoken(Matcher(grammars, Grammar(GrammarForm.JSON_SCHEMA, json.dumps({"const": " " * 40}))))
    assert json.loads(WORDS.decode(outputs)) == " " * 40


def test_what_is_prepared_is_the_same(grammars: Grammars) -> None:
    said = Grammar(GrammarForm.JSON_SCHEMA, '{"enum": ["sea", "season", 7]}')
    outputs = spoken(Matcher(grammars, said), seed=3)
    ahead = Matcher(grammars, said)
    for count in range(len(outputs) + 1):
        ahead.prepare(outputs[:count])
        assert (ahead.mask(outputs[:count]) == Matcher(grammars, said).mask(outputs[:count])).all()
    assert ahead.is_over


def test_outputs_that_are_not_the_grammars_are_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="left the grammar") as refused:
        Matcher(grammars, Grammar(GrammarForm.REGEX, "a+", "guided_regex")).mask(WORDS.encode("bb").ids)
    assert refused.value.field == "guided_regex"


def test_few_are_kept_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(lambda: TEXT, PADDED, [END])
    monkeypatch.setattr(grammar, "KEPT", 3)
    for number in range(10):
        grammars.compile(Grammar(GrammarForm.REGEX, f"a{number}"))
    assert len(grammars._compiled) == 3
