"""What is asked: sessions of turns, each made of the seed and its own number alone, so that two runs ask the same.

Lengths are in tokens; `words_per_token` of the server's tokenizer makes them words. Texts are words in random order: no
two share a prefix unless the shape says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from random import Random

from kvservice.trace_rows import Row

WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "night", "point", "home", "water", "room", "mother", "area", "money", "story",
    "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind",
    "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car",
    "city", "community", "name", "president", "team", "minute", "idea", "body", "information", "back", "parent",
    "face", "level", "office", "door", "health", "person", "art", "war", "history", "party", "result", "change",
    "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher", "force", "education", "foot", "boy",
    "age", "policy", "music", "market", "sense", "nation", "plan", "college", "interest", "death", "experience",
)  # fmt: skip
ZIPF = 1.0  # how much more often the first document is asked than the others: 1, 1/2, 1/3, ...


class Shape(StrEnum):
    CHAT = "chat"
    RAG = "rag"
    AGENT = "agent"
    ONESHOT = "oneshot"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class ShapeSizes:
    """Means of lengths, which lie evenly within a share `spread` of them, and of pauses, which are exponential.
    `prefix_tokens` is exact: a system prompt's, or a document's."""

    prefix_tokens: int
    prompt_tokens: int
    output_tokens: int
    turns: int
    documents: int
    pause_s: float
    spread: float = 0.5


SIZES = {
    Shape.CHAT: ShapeSizes(512, 64, 64, 4, 1, 1.0),
    Shape.RAG: ShapeSizes(1024, 32, 48, 1, 8, 0.0),
    Shape.AGENT: ShapeSizes(512, 96, 32, 6, 1, 0.5),
    Shape.ONESHOT: ShapeSizes(0, 256, 64, 1, 1, 0.0),
    Shape.TRACE: ShapeSizes(0, 0, 0, 1, 1, 0.0),
}


@dataclass(frozen=True, slots=True)
class BenchTurn:
    text: str
    output_tokens: int
    pause_s: float  # since the end of the answer before


@dataclass(frozen=True, slots=True)
class BenchSession:
    """Its turns wait for one another. `at_s`: when it begins, where a trace says so."""

    number: int
    system: str  # "": none
    turns: tuple[BenchTurn, ...]
    at_s: float | None = None


def text_of(random: Random, tokens: float, words_per_token: float) -> str:
    return " ".join(random.choices(WORDS, k=max(round(tokens * words_per_token), 1)))


def sessions(
    shape: Shape, sizes: ShapeSizes, seed: int, words_per_token: float, text_seed: int
) -> Iterator[BenchSession]:
    """Without end. Lengths, pauses and documents are of `seed`, words of `text_seed`."""

    def prefix(number: int) -> str:
        return text_of(Random(f"{text_seed} prefix {number}"), sizes.prefix_tokens, words_per_token)

    prefixes = [prefix(number) for number in range(sizes.documents)] if sizes.prefix_tokens else []
    weights = [1 / (1 + number) ** ZIPF for number in range(sizes.documents)]
    low, high = 1 - sizes.spread, 1 + sizes.spread
    for number in count():
        random, words = Random(f"{seed} session {number}"), Random(f"{text_seed} text {number}")
        turns = []
        for turn in range(sizes.turns):
            text = text_of(words, sizes.prompt_tokens * random.uniform(low, high), words_per_token)
            output = max(round(sizes.output_tokens * random.uniform(low, high)), 1)
            pause_s = random.expovariate(1 / sizes.pause_s) if turn and sizes.pause_s else 0.0
            if shape is Shape.AGENT and turn:
                text = f"Result of the tool: {text}"
            turns.append(BenchTurn(text, output, pause_s))
        system = ""
        if prefixes and shape is Shape.RAG:  # a document is what the user gives
            (document,) = random.choices(prefixes, weights)
            turns[0] = BenchTurn(f"{document}\n\nQuestion: {turns[0].text}", turns[0].output_tokens, 0.0)
        elif prefixes:
            system = prefixes[number % len(prefixes)]
        yield BenchSession(number, system, tuple(turns))


def trace_sessions(
    rows: Sequence[Row], block_tokens: int, text_seed: int, words_per_token: float, speed: float
) -> Iterator[BenchSession]:
    """Each row a session of one turn. A block's text is made of its name: prompts share what the trace's shared."""
    first_s = rows[0].at_s
    for number, row in enumerate(rows):
        left, parts = row.prompt_tokens, []
        for name in row.blocks:
            words = text_of(Random(f"{text_seed} block {name}"), block_tokens, words_per_token)
            parts.append(words if left >= block_tokens else _cut(words, left * words_per_token))
            left -= block_tokens
        if left > 0:  # untokenised text has no blocks
            parts.append(text_of(Random(f"{text_seed} rest {number}"), left, words_per_token))
        turn = BenchTurn(" ".join(filter(None, parts)), max(row.output_tokens, 1), 0.0)
        yield BenchSession(number, "", (turn,), (row.at_s - first_s) / speed)


def _cut(words: str, length: float) -> str:
    return " ".join(words.split(" ")[: max(round(length), 0)])


def _arrivals(seed: int, sessions_per_s: float) -> Iterator[float]:
    """When sessions begin, in seconds: a Poisson process."""
    random = Random(f"{seed} arrivals")
    at_s = 0.0
    while True:
        at_s += random.expovariate(sessions_per_s)
        yield at_s


@dataclass(frozen=True)
class BenchPlan:
    """All that is asked and when, of any server. `rate`: requests/s of an open loop; None: a closed loop, or the
    trace's times."""

    shape: Shape
    sizes: ShapeSizes
    seed: int = 0
    text_seed: int = 0  # another one: other words of the same lengths, which no cache holds yet
    rate: float | None = None
    rows: Sequence[Row] = ()
    block_tokens: int = 0
    speed: float = 1.0

    def sessions(self, words_per_token: float) -> Iterator[BenchSession]:
        if self.shape is Shape.TRACE:
            return trace_sessions(self.rows, self.block_tokens, self.text_seed, words_per_token, self.speed)
        return sessions(self.shape, self.sizes, self.seed, words_per_token, self.text_seed)

    def arrivals(self) -> Iterator[float] | None:
        """When sessions begin; None where they say it, or wait for one another."""
        return None if self.rate is None else _arrivals(self.seed, self.rate / self.sizes.turns)

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.shape is Shape.TRACE

    @property
    def arrival(self) -> str:
        if self.rate is not None:
            return f"Poisson, {self.rate:g} requests/s"
        return f"as recorded, {self.speed:g} times as fast" if self.is_open else "closed loop"


@dataclass(frozen=True)
class LoadLimits:
    """None: without this limit. Without one of requests and duration the sessions end."""

    requests: int | None
    duration_s: float | None
    concurrency: int | None  # clients of the closed loop; most requests at once of the open one

    def done(self, requests: int, elapsed_s: float) -> float | None:
        shares = []
        if self.requests is not None:
            shares.append(requests / self.requests)
        if self.duration_s is not None:
            shares.append(elapsed_s / self.duration_s)
        return min(max(shares), 1.0) if shares else None
