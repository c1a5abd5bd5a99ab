"""What one token is by itself: its bytes, and how OpenAI's answers spell it. Pure.

A token need not be text: with byte-level vocabularies a character may be spread over several. `bytes_of` is exact for
byte-level vocabularies (each of their characters stands for a byte) and for SentencePiece ones with byte fallback
(`<0xE2>`, and a mark that stands for a space); of any other tokenizer it is what decoding the token alone gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK = "\u2581"


def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others are moved behind the first 256 characters."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(moved)}


class TokenSpelling:
    """Spellings of one model's tokens, each made once.

    `token` gives a token's entry in the vocabulary (None: there is none), `decode` the text it stands for by itself.
    """

    def __init__(
        self, tokenizer_json: str, token: Callable[[int], str | None], decode: Callable[[int], str], added: set[int]
    ) -> None:
        self._token = token
        self._decode = decode
        self._added = added  # spelled as they are
        kinds = _decoder_kinds(json.loads(tokenizer_json).get("decoder"))
        self._alphabet = byte_of_character() if "ByteLevel" in kinds else {}
        self._has_bytes = "ByteFallback" in kinds
        self._has_mark = bool(kinds & {"Metaspace", "ByteFallback"})
        self._known: dict[int, tuple[bytes, str]] = {}

    def bytes_of(self, token: int) -> bytes:
        return self._spelled(token)[0]

    def text_of(self, token: int) -> str:
        """The token as text; a part of a character as OpenAI writes it, `bytes:\\xe2\\x80`."""
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
        spelled = self._token(token)
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
        return self._decode(token).encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    """Names of a tokenizer's decoders, those within a sequence too."""
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders") or ()
    return {str(decoder.get("type"))}.union(*(_decoder_kinds(one) for one in inner))
