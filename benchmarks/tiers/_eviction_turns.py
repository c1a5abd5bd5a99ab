"""Requests for one worker's cache, as token ids: shapes of `_shapes`, 16 times shorter, and two of its own.

* read_once: documents, each read once, beside chats that go on;
* chats: many chats, of which the recent ones mostly go on.

A segment's text is a piece of a corpus, by its name, so equal prefixes are equal tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.policies._shapes import RATE, SHAPES, Path, PromptSpan, Segment, ShapeTurn
from kvproto.block_hash import chain

BLOCK = 16
SHORTER = 16  # times; a block of 512 tokens is two of ours
MOST_TOKENS, MOST_OUTPUT = 3500, 48
ROOT = b"benchmark root16"
OWN = ("read_once", "chats")


@dataclass(frozen=True, slots=True)
class CacheTurn:
    """`ids`: prompt, of `prompt` tokens, and output."""

    ids: list[int]
    hashes: list[bytes]
    prompt: int


def turns_of(shape: str, requests: int, corpus: Sequence[int], seed: int = 0) -> list[CacheTurn]:
    span = PromptSpan(0.0, requests / RATE, RATE)
    make = {"read_once": _read_once, "chats": _chats}.get(shape) or SHAPES[shape]
    turns = sorted(make(Random(f"{shape} {seed}"), shape, span), key=lambda turn: turn.at_s)
    return [_turn(turn, corpus) for turn in turns]


def _turn(turn: ShapeTurn, corpus: Sequence[int]) -> CacheTurn:
    ids = [0]
    for segment in turn.path:
        ids += _piece(segment.name, max(1, segment.tokens // SHORTER), corpus)
    prompt = len(ids)
    ids += _piece(f"{turn.session} {prompt}", min(turn.output_tokens, MOST_OUTPUT), corpus)
    ids = ids[:MOST_TOKENS]
    return CacheTurn(ids, chain(ROOT, ids, BLOCK), min(prompt, len(ids) - 1))


def _piece(name: str, tokens: int, corpus: Sequence[int]) -> list[int]:
    tokens = min(tokens, len(corpus) - 1)
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    at = number % (len(corpus) - tokens)
    return [1 + number % 7, *corpus[at : at + tokens - 1]]  # two pieces that begin alike are rare


def _tokens(chance: Random, mean: float, most: int = 1 << 20) -> int:
    return min(most, max(1, round(chance.lognormvariate(0, 0.7) * mean / 1.28)))


def _arrivals(chance: Random, span: PromptSpan) -> Iterator[float]:
    at_s = span.began_s
    while (at_s := at_s + chance.expovariate(span.rate)) < span.ends_s:
        yield at_s


def _grown(chance: Random, chat: tuple[Path, str, int], tokens: int) -> tuple[Path, str, int]:
    path, session, turns = chat
    return (*path, Segment(f"{session}/{turns}", _tokens(chance, tokens))), session, turns + 1


def _length_of(path: Path) -> int:
    return sum(segment.tokens for segment in path)


def _read_once(chance: Random, name: str, span: PromptSpan) -> Iterator[ShapeTurn]:
    chats: list[tuple[Path, str, int]] = []
    for number, at_s in enumerate(_arrivals(chance, span)):
        if chance.random() < 0.5:
            document = Segment(f"{name} document {number}", _tokens(chance, 8000, 16_000))
            yield ShapeTurn(at_s, (Segment(f"{name} reader", 700), document), _tokens(chance, 50), f"d{number}")
            continue
        if len(chats) < 24:
            chats.append(((Segment(f"{name} system", 3000),), f"{name} chat {number}", 0))
        which = chance.randrange(len(chats))
        chats[which] = path, session, _ = _grown(chance, chats[which], 1200)
        yield ShapeTurn(at_s, path, _tokens(chance, 50), session)
        if _length_of(path) > 24_000:
            del chats[which]


def _chats(chance: Random, name: str, span: PromptSpan) -> Iterator[ShapeTurn]:
    chats: list[tuple[Path, str, int]] = []  # the most recent last
    for number, at_s in enumerate(_arrivals(chance, span)):
        if not chats or chance.random() < 0.12:
            chats.append(((Segment(f"{name} system", 2000),), f"{name} {number}", 0))
        which = len(chats) - 1 - min(int(chance.expovariate(1 / 12)), len(chats) - 1)
        path, session, turns = _grown(chance, chats.pop(which), 1500)
        yield ShapeTurn(at_s, path, _tokens(chance, 50), session)
        if _length_of(path) <= 30_000:
            chats.append((path, session, turns))
