"""Token ids to text, one id at a time. Adapter of `tokenizers`.

The joined pieces of a stream equal decoding all ids at once. As a character may span several tokens, and some decoders
drop a text's leading space, each id is decoded with a few settled ids before it: the piece is what the text grew by,
once it does not end within a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 4  # of the prompt, so that its continuation keeps a leading space
MAX_UNSETTLED = 16  # ids; a character has at most 4 bytes, so more is not text


class Detokenizer:
    """Special tokens have no text, unless they are not skipped."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        added = tokenizer.get_added_tokens_decoder().items() if skip_special else ()
        self.special = frozenset(token for token, one in added if one.special)

    def to_json(self) -> str:
        """The tokenizer, as its file has it."""
        return str(self._tokenizer.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text

    @cached_property
    def whole(self) -> Detokenizer:
        """The same, that skips no special tokens."""
        return Detokenizer(self._tokenizer, skip_special=False)

    def stream(self, prompt_ids: Sequence[int]) -> DetokenizerStream:
        context = [token for token in prompt_ids[-CONTEXT_TOKENS:] if token not in self.special]
        return DetokenizerStream(self, context)


class DetokenizerStream:
    """`pending`: pushed ids have text that was not returned yet. `_window`: a few ids whose text `_settled` was
    returned (or was the prompt's), then the unsettled ones."""

    def __init__(self, detokenizer: Detokenizer, context: list[int]) -> None:
        self._detokenizer = detokenizer
        self._window = context
        self._settled = detokenizer.decode(context)
        if self._settled.endswith(REPLACEMENT):  # the prompt ends within a character
            self._window, self._settled = [], ""
        self._unsettled = 0
        self.pending = False

    def fork(self) -> DetokenizerStream:
        """One that goes on from here by itself."""
        other = copy(self)
        other._window = self._window.copy()
        return other

    def push(self, token: int) -> str:
        if token in self._detokenizer.special:
            return ""
        self._window.append(token)
        self._unsettled += 1
        text = self._detokenizer.decode(self._window)
        if text.endswith(REPLACEMENT):
            self.pending = True
            if self._unsettled < MAX_UNSETTLED:
                return ""
            piece = text[len(self._settled) : -1]  # only the last character can still change
            self._slide(MAX_UNSETTLED // 2)
            self._settled = self._settled.removesuffix(REPLACEMENT)
            return piece
        piece = text[len(self._settled) :]
        if piece or self._unsettled >= MAX_UNSETTLED:
            self._slide(self._unsettled)
        self.pending = False
        return piece

    def skip(self, ids: Sequence[int]) -> str | None:
        """As a `push` of each to a new stream, but much faster. None, and nothing happens, if the text would end within
        a character or holds bytes that are no text."""
        new = [token for token in ids if token not in self._detokenizer.special]
        skipped = self._detokenizer.decode([*self._window, *new])[len(self._settled) :]
        if REPLACEMENT in skipped:  # such bytes decode differently together than one by one
            return None
        for count in range(1, min(len(new), MAX_UNSETTLED) + 1):  # until it begins at a character
            settled = self._detokenizer.decode(new[-count:])
            if REPLACEMENT not in settled:
                self._window, self._settled = new[-count:], settled
                return skipped
        return None if new else skipped

    def flush(self) -> str:
        """The pending text; the stream has ended."""
        text = self._detokenizer.decode(self._window)
        piece = text[len(self._settled) :]
        self._slide(len(self._window))
        self.pending = False
        return piece

    def _slide(self, keep: int) -> None:
        self._window = self._window[-keep:] if keep else []
        self._settled = self._detokenizer.decode(self._window)
        self._unsettled = 0
