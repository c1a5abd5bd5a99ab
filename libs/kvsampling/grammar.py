"""What the output of one sequence may be, token by token. Adapter of `llguidance`.

    Grammar ──compile──▶ Matcher, one per sequence ──prepare, on a thread beside the forward pass──▶ mask ──▶ sampler

A matcher follows the list of its sequence's outputs. So a sequence that goes on elsewhere, with its outputs in hand,
may be there what it might have been here. Compiling has no bound in time or memory of its own: a process that has one
tries a grammar first (`kvsampling.grammar_check`).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvproto.closed_schema import close
from kvproto.errors import InvalidRequest, Unavailable
from kvproto.messages import Grammar, GrammarForm

if TYPE_CHECKING:  # an engine without a model has no numpy, either
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

    Mask = npt.NDArray[np.bool_]  # of each token of the vocabulary: it may come next

KEPT = 256  # compiled grammars
MOST_BLANKS = 8  # tokens, in JSON, where anything else may come: some models would put nothing else for ever
_JSON = frozenset((GrammarForm.JSON_OBJECT, GrammarForm.JSON_SCHEMA))


class Matcher:
    """Of one sequence. `prepare` and `mask` take its outputs so far, a list that only grows; one thread at a time."""

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self._grammars, self._grammar = grammars, grammar
        self._known: LLMatcher | None = None
        self._taken = 0
        self._next: Future[Mask] | None = None

    @property
    def is_over(self) -> bool:
        """Only an end token may come."""
        return self._known is not None and bool(self._known.is_stopped())

    def prepare(self, outputs: Sequence[int]) -> None:
        """Begin to compute what the next `mask` returns."""
        self._next = _threads().submit(self._compute, outputs)

    def mask(self, outputs: Sequence[int]) -> Mask:
        """`[vocab]`. Raises InvalidRequest where outputs are not the grammar's, or it cannot be followed further, and
        what `Grammars.compile` does."""
        ready, self._next = self._next, None
        return self._compute(outputs) if ready is None else ready.result()

    def _compute(self, outputs: Sequence[int]) -> Mask:
        import numpy as np

        if (matcher := self._known) is None:
            matcher = self._known = self._grammars.compile(self._grammar).deep_copy()
        new = list(outputs[self._taken :])
        if new and not matcher.consume_tokens(new):
            raise self._refusal("the output left the grammar", matcher)
        self._taken += len(new)
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise self._refusal("the grammar is too complex", matcher)
        allowed = np.zeros(self._grammars.vocab, np.bool_)
        bits = np.unpackbits(packed, bitorder="little")[: len(allowed)]
        allowed[: len(bits)] = bits
        return self._without_blanks(allowed, outputs) if self._grammar.form in _JSON else allowed

    def _without_blanks(self, allowed: Mask, outputs: Sequence[int]) -> Mask:
        blank = self._grammars.blank
        if len(outputs) < MOST_BLANKS or not all(blank[token] for token in outputs[-MOST_BLANKS:]):
            return allowed
        others = allowed & ~blank
        return others if others.any() else allowed

    def _refusal(self, what: str, matcher: LLMatcher) -> InvalidRequest:
        return InvalidRequest(f"{what}: {matcher.get_error()[:200]}", field=self._grammar.said)


class Grammars:
    """Of one tokenizer, given as what returns its tokenizer.json; `vocab` is how many logits the model has. From any
    thread."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab: int, end_ids: Iterable[int]) -> None:
        self.tokenizer_json, self.vocab, self.end_ids = tokenizer_json, vocab, list(end_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self.blank: Mask  # once one is compiled: it is white space alone

    @classmethod
    def of_json(cls, text: str) -> Grammars:
        tokenizer, vocab, end_ids = json.loads(text)
        return cls(lambda: str(tokenizer), vocab, end_ids)

    def to_json(self) -> str:
        """A line, for another process."""
        return json.dumps([self.tokenizer_json(), self.vocab, self.end_ids])

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Raises InvalidRequest that says what of the grammar is wrong, Unavailable without llguidance."""
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None:
            known = self._compile(grammar)  # others do not wait for it
        with self._lock:
            self._compiled[grammar] = known
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return known

    def _compile(self, grammar: Grammar) -> LLMatcher:
        import numpy as np

        llguidance = _llguidance(grammar.said)
        if self._tokenizer is None:
            try:
                words = _without_specials(self.tokenizer_json())
                tokenizer = llguidance.LLTokenizer(words, eos_token=self.end_ids or None)
            except ValueError as error:
                why = f"the model's tokenizer is of a kind that follows no grammars: {str(error)[:200]}"
                raise InvalidRequest(why, field=grammar.said) from None
            self.blank = np.zeros(self.vocab, np.bool_)
            for token in range(min(self.vocab, tokenizer.vocab_size)):
                self.blank[token] = tokenizer.decode_bytes([token]).isspace()
            self._tokenizer = tokenizer
        found: LLMatcher = llguidance.LLMatcher(self._tokenizer, form_of(grammar), log_level=0)
        if found.is_error():
            raise InvalidRequest(f"cannot be compiled: {found.get_error()[:500]}", field=grammar.said)
        return found


def _without_specials(tokenizer_json: str) -> str:
    """Special tokens have other names: llguidance would take a text that must come for the token that it names."""
    said = json.loads(tokenizer_json)
    names = {one["content"]: f"\U0010ffff{one['id']}" for one in said["added_tokens"] if one["special"]}
    for one in said["added_tokens"]:
        one["content"] = names.get(one["content"], one["content"])
    words = said["model"]["vocab"]
    if isinstance(words, dict):
        said["model"]["vocab"] = {names.get(word, word): token for word, token in words.items()}
    else:
        said["model"]["vocab"] = [[names.get(word, word), score] for word, score in words]
    return json.dumps(said | {"post_processor": None})


def form_of(grammar: Grammar) -> str:
    """As llguidance reads it. Raises InvalidRequest."""
    llguidance, text, field = _llguidance(grammar.said), grammar.text, grammar.said
    if grammar.form is GrammarForm.LARK:
        try:
            return str(llguidance.grammar_from("grammar", text))  # also GBNF
        except ValueError as error:
            raise InvalidRequest(f"cannot be compiled: {error}", field=field) from None
    if grammar.form is GrammarForm.REGEX:
        return str(llguidance.LLMatcher.grammar_from_regex(text))
    said = {"type": "object"} if grammar.form is GrammarForm.JSON_OBJECT else _json(text, field)
    if grammar.form is GrammarForm.CHOICE:
        if not isinstance(said, list) or not said or not all(isinstance(one, str) and one for one in said):
            raise InvalidRequest("choices must be a list of texts that are not empty", field=field)
        return "start: " + " | ".join(json.dumps(one) for one in said)
    if not isinstance(said, dict):
        raise InvalidRequest("a schema must be an object", field=field)
    return str(llguidance.LLMatcher.grammar_from_json_schema(dict(close(said))))


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"is no JSON: {error}", field=field) from None


def _llguidance(field: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise Unavailable("this worker has no grammars: pip install 'kvfleet[grammar]'", field=field) from None
    return llguidance


_POOL: list[ThreadPoolExecutor] = []


def _threads() -> ThreadPoolExecutor:
    if not _POOL:
        _POOL.append(ThreadPoolExecutor(1, thread_name_prefix="grammar"))
    return _POOL[0]
