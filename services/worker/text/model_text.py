"""A model's tokenizer, as requests need it. Adapter of `tokenizers`. Its calls take long for long texts: any thread may
make them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from kvfleet.worker.text.detokenizer import Detokenizer
from kvproto.errors import EngineFailure, InvalidRequest


class ModelText:
    """`special`: ids of the special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        added = tokenizer.get_added_tokens_decoder().items()
        self.special = {token.content: number for number, token in added if token.special}

    def encode(self, text: str, *, begins: bool, field: str) -> tuple[int, ...]:
        """With the model's BOS where it `begins`. Raises InvalidRequest that names the field."""
        try:
            ids = tuple(self._tokenizer.encode(text, add_special_tokens=begins).ids)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise InvalidRequest(f"the prompt cannot be tokenised: {str(error)[:200]}", field=field) from None
        if not ids:
            raise InvalidRequest("the prompt has no tokens", field=field)
        return ids

    def generated(self, prompt_ids: Sequence[int], ids: Sequence[int], *, skip_special: bool) -> str:
        """What was said with these ids, as a stream of them says it. Raises EngineFailure if that cannot be rebuilt."""
        try:
            stream = (self._detokenizer if skip_special else self._detokenizer.whole).stream(prompt_ids)
            text = stream.skip(ids)
            return text if text is not None else "".join(map(stream.push, ids)) + stream.flush()
        except Exception as error:  # a tokenizer's bug is that request's alone
            raise EngineFailure(f"the request's tokens could not be made text: {error}") from error
