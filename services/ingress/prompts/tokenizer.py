"""Adapter: `tokenizers`, of which this is the only importer here: one model's tokenizer with its chat template, made
from the worker's bundle, and the spelling of its tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from kvchat.chat_template import template_of
from kvproto.errors import Unavailable
from kvproto.messages import Bundle

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK = "\u2581"


def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow the first 256 characters."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(moved)}


class TokenSpelling:
    """Spellings of one model's tokens, each made once. `source` is the JSON that the tokenizer was made of.

    `bytes_of` is exact for byte-level vocabularies (each of their characters stands for a byte) and for SentencePiece
    ones with byte fallback (`<0xE2>`, and a mark for a space); for others it is the token decoded alone.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self._tokenizer = tokenizer
        self._added = set(tokenizer.get_added_tokens_decoder())  # spelled as they are
        kinds = _decoder_kinds(json.loads(source).get("decoder"))
        self._alphabet = byte_of_character() if "ByteLevel" in kinds else {}
        self._has_bytes = "ByteFallback" in kinds
        self._has_mark = bool(kinds & {"Metaspace", "ByteFallback"})
        self._known: dict[int, tuple[bytes, str]] = {}

    def bytes_of(self, token: int) -> bytes:
        return self._spelled(token)[0]

    def text_of(self, token: int) -> str:
        """A part of a character is spelled as by OpenAI, `bytes:\\xe2\\x80`."""
        return self._spelled(token)[1]

    def _spelled(self, token: int) -> tuple[bytes, str]:
        known = self._known.get(token)
        if known is None:
            data = self._bytes(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            known = self._known[token] = data, text
        return known

    def _bytes(self, token: int) -> bytes:
        spelled = self._tokenizer.id_to_token(token)
        if spelled is None:
            return b""
        if token in self._added:
            return spelled.encode()
        if self._alphabet:
            if all(character in self._alphabet for character in spelled):
                return bytes(self._alphabet[character] for character in spelled)
            return spelled.encode()
        if self._has_bytes and (byte := BYTE.fullmatch(spelled)) is not None:
            return bytes.fromhex(byte[1])
        if self._has_mark:
            return spelled.replace(SPACE_MARK, " ").encode()
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    """Names of a tokenizer's decoders, those within a sequence too."""
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders") or ()
    return {str(decoder.get("type"))}.union(*(_decoder_kinds(one) for one in inner))


class ModelTokenizer:
    """Text to ids and back as at the worker, and chats to text. Immutable. Raises Unavailable for a bad bundle."""

    def __init__(self, bundle: Bundle) -> None:
        try:
            tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        except Exception as error:  # noqa: BLE001  the library raises nothing narrower
            raise Unavailable(f"the tokenizer of {bundle.model!r} cannot be read: {str(error)[:200]}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        self.special_texts = tuple(special.values())
        self.special = {text: token for token, text in special.items()}
        self.spelling = TokenSpelling(tokenizer, bundle.tokenizer_json)
        self._template = template_of(bundle)
        self._max_token_chars = _longest_token(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """`add_special_tokens` puts the model's BOS in front; spelled-out specials always count. The batch call lets
        other threads run, so this may be called from an executor."""
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are spelled out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def render(self, messages: list[dict[str, Any]], values: Mapping[str, Any] = {}) -> str:
        """A chat with the generation prompt. Raises InvalidRequest without a template, or if it refuses."""
        return self._template.render(messages, values)

    def least_tokens(self, text: str) -> int:
        """A cheap lower bound for the tokens of a text; 0: unknown."""
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._max_token_chars) if self._max_token_chars else 0


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token where every byte of a text is in some token (byte-level, no normalizer); else 0."""
    if tokenizer.normalizer is not None or not isinstance(tokenizer.decoder, ByteLevel):
        return 0
    return max((len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True)), default=0)
