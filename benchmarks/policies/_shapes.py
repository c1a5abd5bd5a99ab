"""Traces with other sharing than recorded ones have, made by a seeded generator. All chance comes from the seed.

* tree: prompts end at the leaves of three trees of instructions, four levels deep, some leaves much more often than
  others, and each goes on with text of its own;
* agents: loops of short steps on one growing context, with a tool's pause after each; agents of five kinds, each kind
  with a long prompt of its own;
* documents: each is asked about five times in half a minute or so, then never again;
* shift: trees and agents; half-way they stop, and documents, other trees and other agents go on.

A prompt is a path of segments, and a segment's name stands for all before it. A block is named by the last segment that
reaches into it and by its number, so two prompts share the blocks that end within segments which they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import TypeAlias

from kvfleet.placement.simulate.trace import Trace, make_trace
from kvservice.trace_rows import Row

BLOCK_TOKENS = 512
REQUESTS = 16_000

# Requests per second. At about two thirds of what 8 workers of the default speed can do, so that pauses are nearly as
# long as they are said to be here; a study at another load stretches all times.
RATE = 20.0

TREES, LEVELS, BRANCHES = 3, 4, 4  # the root is a level too
STEPS = 16  # of an agent's loop, on average
STEP_S = 6.0  # from one to the next, on average; a third of it at least, as the answer itself takes time
PAUSE_SPREAD = 1.2  # sigma of the lognormal rest: some tools take a minute
KINDS = 5  # of agents
QUESTIONS = 5  # per document
ASKED_AGAIN_S = 6.0  # from one to the next, on average
SPREAD = 0.7  # sigma of lognormal lengths
LONGEST = 32_000  # tokens of a document, and of an agent's context, whose loop ends there


@dataclass(frozen=True, slots=True)
class Segment:
    name: str
    tokens: int


Path: TypeAlias = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class ShapeTurn:
    """One request to be."""

    at_s: float
    path: Path
    output_tokens: int
    session: str


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Turns come in [began_s, ends_s), so many a second."""

    began_s: float
    ends_s: float
    rate: float


def make_shape(shape: str, requests: int = REQUESTS, seed: int = 0) -> Trace:
    """About so many requests of one of `SHAPES`, somewhat fewer where what is begun goes on after the end. Raises
    KeyError if there is no such shape."""
    turns = SHAPES[shape](Random(f"{shape} {seed}"), shape, PromptSpan(0.0, requests / RATE, RATE))
    return make_trace([_row(turn) for turn in sorted(turns, key=lambda turn: turn.at_s)], BLOCK_TOKENS)


# ------------------------------------------------------------------ the shapes


def _tree(chance: Random, name: str, span: PromptSpan) -> Iterator[ShapeTurn]:
    leaves = [leaf for tree in range(TREES) for leaf in _leaves(chance, (Segment(f"{name}{tree}", 3000),))]
    chance.shuffle(leaves)
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(leaves))))  # Zipf
    for number, at_s in enumerate(_poisson(chance, span.began_s, span.ends_s, span.rate)):
        (leaf,) = chance.choices(leaves, cum_weights=weights)
        session = f"{name}.{number}"
        yield ShapeTurn(at_s, (*leaf, Segment(session, _length(chance, 1500))), _length(chance, 30), session)


def _leaves(chance: Random, path: Path) -> Iterator[Path]:
    if len(path) == LEVELS:
        yield path
        return
    for branch in range(BRANCHES):
        yield from _leaves(chance, (*path, Segment(f"{path[-1].name}/{branch}", _length(chance, 2000))))


def _agents(chance: Random, name: str, span: PromptSpan) -> Iterator[ShapeTurn]:
    """As many loops at all times: where one ends the next begins."""
    kinds = [Segment(f"{name}{kind}", _length(chance, 6000)) for kind in range(KINDS)]
    for desk in range(round(span.rate * STEP_S)):
        at_s, loop = span.began_s + chance.uniform(0, STEP_S), 0
        while at_s < span.ends_s:
            session = f"{name}.{desk}.{loop}"
            path: Path = (chance.choice(kinds), Segment(session, _length(chance, 1500)))
            for step in range(1 + int(chance.expovariate(1 / (STEPS - 0.5)))):
                if at_s >= span.ends_s or sum(segment.tokens for segment in path) > LONGEST:
                    break
                output = _length(chance, 40)
                yield ShapeTurn(at_s, path, output, session)
                at_s += STEP_S / 3 + chance.lognormvariate(math.log(2 / 3 * STEP_S) - PAUSE_SPREAD**2 / 2, PAUSE_SPREAD)
                path = (*path, Segment(f"{session}/{step}", output + _length(chance, 1200)))
            loop += 1


def _documents(chance: Random, name: str, span: PromptSpan) -> Iterator[ShapeTurn]:
    head = Segment(name, 700)
    for number, at_s in enumerate(_poisson(chance, span.began_s, span.ends_s, span.rate / QUESTIONS)):
        session = f"{name}.{number}"
        document = Segment(session, min(_length(chance, 8000), LONGEST))
        for question in range(QUESTIONS):
            own = Segment(f"{session}/{question}", _length(chance, 100))
            if at_s < span.ends_s:
                yield ShapeTurn(at_s, (head, document, own), _length(chance, 50), session)
            at_s += chance.expovariate(1 / ASKED_AGAIN_S)


def _shift(chance: Random, name: str, span: PromptSpan) -> Iterator[ShapeTurn]:
    half = (span.began_s + span.ends_s) / 2
    before, after = PromptSpan(span.began_s, half, span.rate / 2), PromptSpan(half, span.ends_s, span.rate / 3)
    yield from _tree(chance, f"{name} tree", before)
    yield from _agents(chance, f"{name} agent", before)
    yield from _tree(chance, f"{name} other tree", after)
    yield from _agents(chance, f"{name} other agent", after)
    yield from _documents(chance, f"{name} document", after)


SHAPES: dict[str, Callable[[Random, str, PromptSpan], Iterator[ShapeTurn]]] = {
    "tree": _tree,
    "agents": _agents,
    "documents": _documents,
    "shift": _shift,
}

# ------------------------------------------------------------------ what they are made of


def _poisson(chance: Random, began_s: float, ends_s: float, rate: float) -> Iterator[float]:
    at_s = began_s + chance.expovariate(rate)
    while at_s < ends_s:
        yield at_s
        at_s += chance.expovariate(rate)


def _length(chance: Random, mean: float) -> int:
    """Lognormal: most are shorter than the mean, a few much longer."""
    return max(1, round(chance.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)))


def _row(turn: ShapeTurn) -> Row:
    blocks, tokens = blocks_of(turn.path)
    return Row(turn.at_s, tokens, turn.output_tokens, blocks, turn.session)


def blocks_of(path: Path) -> tuple[list[str], int]:
    """The names of a prompt's blocks, and its tokens."""
    blocks: list[str] = []
    tokens = 0
    for segment in path:
        whole = tokens // BLOCK_TOKENS
        del blocks[whole:]  # a block that the segment before only began is this one's
        tokens += segment.tokens
        blocks += [f"{segment.name}:{number}" for number in range(whole, math.ceil(tokens / BLOCK_TOKENS))]
    return blocks, tokens
