"""A trace of agents that wait for their tools, beside people who chat. All chance comes from the seed.

* agents: loops of steps on one growing context, each kind of agent with a long prompt of its own; an answer calls one
  of three tools, and the next step comes when it has run. A tool takes about as long each time: the spread is its own;
* chats: conversations of people, who read and think between turns; no tool, so nothing is expected of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from benchmarks.policies._shapes import BLOCK_TOKENS, Path, Segment, ShapeTurn, blocks_of
from kvfleet.placement.simulate.trace import Trace, make_trace
from kvservice.trace_rows import Row

TOOLS = {"tests": 60.0, "crawl": 90.0, "build": 120.0}  # median seconds, each as often as the others
TOOL_SPREAD = 0.25  # sigma of the lognormal
AGENTS, CHATS = 200, 60  # at all times
KINDS, KIND_TOKENS = 5, 6000
OPENING_TOKENS, STEP_TOKENS, OUTPUT_TOKENS = 12_000, 800, 60  # means
STEPS, LONGEST = 24, 64_000
CHAT_TOKENS, TURN_TOKENS, TURNS = 6000, 250, 8
THINK_S, THINK_SPREAD = 30.0, 1.0
ANSWER_S = 2.0  # until an answer is there, about
SPREAD = 0.6  # of lengths


def make_agents(duration_s: float, seed: int = 0) -> Trace:
    rows: list[Row] = []
    chance = Random(f"agents {seed}")
    kinds = [Segment(f"kind {kind}", KIND_TOKENS) for kind in range(KINDS)]
    for desk in range(AGENTS):
        rows += (_row(turn, tool) for turn, tool in _agent(chance, kinds, f"agent {desk}", duration_s))
    for desk in range(CHATS):
        rows += (_row(turn, "") for turn in _chat(chance, f"chat {desk}", duration_s))
    return make_trace(rows, BLOCK_TOKENS)


def is_agent(session: str) -> bool:
    return session.startswith("agent")


def _agent(chance: Random, kinds: list[Segment], name: str, duration_s: float) -> Iterator[tuple[ShapeTurn, str]]:
    """Where one loop ends the next begins."""
    at_s, loop = chance.uniform(0, 75.0), 0
    while at_s < duration_s:
        session = f"{name}.{loop}"
        path: Path = (chance.choice(kinds), Segment(session, _length(chance, OPENING_TOKENS)))
        for step in range(1 + int(chance.expovariate(1 / (STEPS - 0.5)))):
            if at_s >= duration_s or sum(segment.tokens for segment in path) > LONGEST:
                break
            output, tool = _length(chance, OUTPUT_TOKENS), chance.choice(list(TOOLS))
            yield ShapeTurn(at_s, path, output, session), tool
            at_s += ANSWER_S + chance.lognormvariate(math.log(TOOLS[tool]), TOOL_SPREAD)
            path = (*path, Segment(f"{session}/{step}", output + _length(chance, STEP_TOKENS)))
        loop += 1


def _chat(chance: Random, name: str, duration_s: float) -> Iterator[ShapeTurn]:
    at_s, loop = chance.uniform(0, THINK_S), 0
    while at_s < duration_s:
        session = f"{name}.{loop}"
        path: Path = (Segment("chats", 512), Segment(session, _length(chance, CHAT_TOKENS)))
        for turn in range(1 + int(chance.expovariate(1 / (TURNS - 0.5)))):
            if at_s >= duration_s:
                break
            output = _length(chance, 4 * OUTPUT_TOKENS)
            yield ShapeTurn(at_s, path, output, session)
            at_s += ANSWER_S + chance.lognormvariate(math.log(THINK_S), THINK_SPREAD)
            path = (*path, Segment(f"{session}/{turn}", output + _length(chance, TURN_TOKENS)))
        loop += 1


def _length(chance: Random, mean: float) -> int:
    return max(1, round(chance.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)))


def _row(turn: ShapeTurn, tool: str) -> Row:
    blocks, tokens = blocks_of(turn.path)
    return Row(turn.at_s, tokens, turn.output_tokens, blocks, turn.session, tool)
