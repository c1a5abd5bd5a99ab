"""Reuse of generated ids in the next turn of a chat: rendered text -> the ids it already has. Pure.

Generated text need not tokenise back into the generated ids, and then no attention state behind it can be reused. So a
finished turn is remembered under its rendered prompt, and a text that starts with it tokenises only the rest:

    remembered   |---- prompt text ----|-- generated --|         ids: prompt ids + generated ids
    new text     |---- prompt text ----|-- generated --|<end><user>...<assistant>
                  spliced ids ........................  tokenised alone

A look-up costs one pass over the text: prompts are filed under the hash of their text up to the last multiple of
`STRIDE` characters and the exact characters after it, so at each multiple only the distinct lengths of those tails are
tried. Nothing is spliced unless it decodes to exactly the text it stands for.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfleet.ingress.prompts.tokenizer import ModelTokenizer

STRIDE = 256
TURNS_PER_PROMPT = 4  # regenerations of one prompt that are told apart
CANDIDATES = 8
CONTEXT_IDS = 8  # decoders may treat the first token of a text specially: decode after some that came before
_OVERHEAD = 600  # measured bytes of one entry beside its ids and texts


@dataclass(frozen=True, slots=True)
class Splice:
    """Ids that stand for the first `chars` characters of a text."""

    ids: tuple[int, ...]
    chars: int


@dataclass(slots=True)
class _Turn:
    prompt_ids: array[int]
    ids: array[int]
    text: str  # what `ids` decode to, exactly

    @property
    def size(self) -> int:
        return 4 * (len(self.prompt_ids) + len(self.ids)) + 4 * len(self.text) + _OVERHEAD


_Key = tuple[bytes, str]


@dataclass(slots=True)
class SpliceIndex:
    """Bounded memory of finished turns, least recently used first out. Owned by the event loop. `scope` keeps tenants
    and models apart."""

    max_bytes: int
    hits_total: int = 0
    misses_total: int = 0
    bytes_used: int = 0
    _turns: OrderedDict[_Key, list[_Turn]] = field(default_factory=OrderedDict)
    _tails: dict[bytes, dict[int, int]] = field(default_factory=dict)  # stride digest -> tail length -> prompts

    def remember(
        self, scope: str, prompt: str, prompt_ids: Sequence[int], ids: Sequence[int], codec: ModelTokenizer
    ) -> None:
        """`prompt` is the rendered text that `prompt_ids` decode to, exactly."""
        text = text_after(codec, prompt_ids, ids)
        turn = _Turn(array("I", prompt_ids), array("I", ids), text)
        key = (_digests(scope, prompt)[-1], prompt[len(prompt) // STRIDE * STRIDE :])
        if turn.size + 4 * len(key[1]) > self.max_bytes:
            return
        turns = self._turns.get(key)
        if turns is None:
            turns = self._turns[key] = []
            lengths = self._tails.setdefault(key[0], {})
            lengths[len(key[1])] = lengths.get(len(key[1]), 0) + 1
            self.bytes_used += 4 * len(key[1])
        self._turns.move_to_end(key)
        same = [old for old in turns if old.ids == turn.ids]
        for old in same or turns[: max(0, len(turns) + 1 - TURNS_PER_PROMPT)]:
            turns.remove(old)
            self.bytes_used -= old.size
        turns.append(turn)
        self.bytes_used += turn.size
        while self.bytes_used > self.max_bytes:
            self._forget(next(iter(self._turns)))

    def find(self, scope: str, text: str, codec: ModelTokenizer) -> Splice | None:
        best: tuple[int, _Turn, int, _Key] | None = None
        for key, chars in self._candidates(scope, text):
            for turn in reversed(self._turns[key]):
                known = chars + agreeing(turn.text, text[chars : chars + len(turn.text)])
                if best is None or known > best[0]:
                    best = (known, turn, chars, key)
        found = _match(best[1], text, best[2], codec) if best is not None else None
        if best is None or found is None:
            self.misses_total += 1
            return None
        self._turns.move_to_end(best[3])
        self.hits_total += 1
        return found

    def _candidates(self, scope: str, text: str) -> list[tuple[_Key, int]]:
        """Remembered prompts that `text` starts with, longest first."""
        found: list[tuple[_Key, int]] = []
        digests = _digests(scope, text)
        for level in range(len(digests) - 1, -1, -1):
            lengths = self._tails.get(digests[level])
            if lengths is None:
                continue
            start = level * STRIDE
            for length in sorted(lengths, reverse=True):
                key = (digests[level], text[start : start + length])
                if len(key[1]) == length and key in self._turns:
                    found.append((key, start + length))
                    if len(found) == CANDIDATES:
                        return found
        return found

    def _forget(self, key: _Key) -> None:
        self.bytes_used -= sum(turn.size for turn in self._turns.pop(key)) + 4 * len(key[1])
        lengths = self._tails[key[0]]
        lengths[len(key[1])] -= 1
        if not lengths[len(key[1])]:
            del lengths[len(key[1])]
        if not lengths:
            del self._tails[key[0]]

    def __len__(self) -> int:
        return sum(len(turns) for turns in self._turns.values())

    def check_integrity(self) -> None:
        assert self.bytes_used == sum(
            sum(turn.size for turn in turns) + 4 * len(key[1]) for key, turns in self._turns.items()
        )
        assert self.bytes_used <= self.max_bytes
        counted: dict[bytes, dict[int, int]] = {}
        for digest, tail in self._turns:
            lengths = counted.setdefault(digest, {})
            lengths[len(tail)] = lengths.get(len(tail), 0) + 1
        assert counted == self._tails
        assert all(1 <= len(turns) <= TURNS_PER_PROMPT for turns in self._turns.values())


def join(splice: Splice, text: str, codec: ModelTokenizer) -> tuple[int, ...] | None:
    """The spliced ids, and the rest tokenised alone. None if they would not decode to `text`."""
    rest = text[splice.chars :]
    if not rest:
        return splice.ids
    tail = codec.encode(rest, add_special_tokens=False)
    if text_after(codec, splice.ids, tail) != rest:
        return None  # the tokenizer changes text: it prepends a space, or normalises
    return splice.ids + tail


def match_history(ids: Sequence[int], text: str, codec: ModelTokenizer) -> Splice | None:
    """The part of a session's history, whose text was not kept, that `text` starts with."""
    return _match(_Turn(array("I"), array("I", ids), codec.decode(ids)), text, 0, codec)


def text_after(codec: ModelTokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """What `ids` add to the text when they follow `before`."""
    context = list(before[-CONTEXT_IDS:])
    if not context:
        return codec.decode(ids)
    return codec.decode([*context, *ids])[len(codec.decode(context)) :]


def _digests(scope: str, text: str) -> list[bytes]:
    """Hash of (scope, the first i * STRIDE characters) for every i that fits."""
    running = hashlib.blake2b(scope.encode() + b"\0", digest_size=16)
    digests = [running.digest()]
    for start in range(0, len(text) // STRIDE * STRIDE, STRIDE):
        running.update(text[start : start + STRIDE].encode("utf-8", "surrogatepass"))
        digests.append(running.digest())
    return digests


def agreeing(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading characters or ids two sequences share, by halving: comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _match(turn: _Turn, text: str, prompt_chars: int, codec: ModelTokenizer) -> Splice | None:
    """The part of a turn that `text` starts with, cut where tokenising the rest alone is natural."""
    if text.startswith(turn.text, prompt_chars):
        ids = (*turn.prompt_ids, *turn.ids)
        return Splice(ids, prompt_chars + len(turn.text)) if ids else None
    kept, chars = _longest_cut(turn, text, prompt_chars, codec)
    ids = (*turn.prompt_ids, *turn.ids[:kept])
    end = prompt_chars + chars
    if end < len(text) and not text.startswith(codec.special_texts, end):
        # It diverges inside a stretch of text: tokenise that stretch anew, from the last special token on.
        special = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in codec.special_ids), -1)
        removed = text_after(codec, ids[: special + 1], ids[special + 1 :])
        ids, chars = ids[: special + 1], chars - len(removed)
    return Splice(ids, prompt_chars + chars) if ids else None


def _longest_cut(turn: _Turn, text: str, start: int, codec: ModelTokenizer) -> tuple[int, int]:
    """How many generated ids decode to a prefix of `text[start:]`, and to how many characters."""
    low, high = 0, len(turn.ids) if text.startswith(turn.text[:1], start) else 0
    while low < high:  # what they decode to only grows; a cut character may flicker, hence the walk back below
        middle = (low + high + 1) // 2
        if text.startswith(text_after(codec, turn.prompt_ids, turn.ids[:middle]), start):
            low = middle
        else:
            high = middle - 1
    for kept in range(low, max(low - 8, 0), -1):
        cut = text_after(codec, turn.prompt_ids, turn.ids[:kept])
        if not cut.endswith("�") and text.startswith(cut, start):
            return kept, len(cut)
    return 0, 0
