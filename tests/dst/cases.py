"""What the clients of a run ask for: few and short cases over every transport, and how each client behaves. Pure."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from kvproto.messages import Grammar, GrammarForm
from tests.chaos.behaviour import PLAIN, Behaviour
from tests.chaos.cases import IN_BACKGROUND, Case
from tests.chaos.history import Transport
from tests.chaos.layout import TENANTS

MODEL = "demo"
REQUESTS, LOAD_S = 40, 30.0  # that begin within so long
LIMIT_S = 40.0  # of each request
_LENGTHS = (3, 6, 12, 24, 48)  # of answers, in tokens
_EVERY = (Transport.CLIENT, Transport.CLIENT, Transport.CLIENT, Transport.BARE_MSGPACK, Transport.BARE_JSON,
          Transport.CHAT, Transport.COMPLETIONS, Transport.GENERATE, Transport.BACKGROUND)  # fmt: skip
_WORDS = ("the", "king", "and", "his", "men", "rode", "to", "gate", "of", "old", "town", "where", "a", "woman", "sold")
_THING = {"type": "object", "properties": {"of": {"enum": ["sea", "rain", "night"]}}, "required": ["of"]}
_WAYS: tuple[dict[str, Any], ...] = (
    {}, {}, {"temperature": 0.8, "seed": 1}, {"n": 2, "temperature": 0.9, "seed": 3}, {"logprobs": 2},
    {"frequency_penalty": 0.5}, {"stop": ["the", "king"]},
    {"grammar": Grammar(GrammarForm.JSON_SCHEMA, json.dumps(_THING)), "temperature": 1.0, "seed": 7},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """`deletes`: its client has what it left deleted, once it has the answer or has left."""

    at_s: float
    case: Case
    behaviour: Behaviour
    deletes: bool = False


def cases() -> list[Case]:
    """The same ones for every seed: each has one right answer."""
    chance = random.Random(0)
    shared = [_ids(chance, length) for length in (16, 48, 96)]
    return [_case(at, chance, shared) for at in range(4 * len(_EVERY))]


def _case(at: int, chance: random.Random, shared: list[tuple[int, ...]]) -> Case:
    transport = _EVERY[at % len(_EVERY)]
    way = _WAYS[at // len(_EVERY) * 3 % len(_WAYS) if transport.is_http else at % len(_WAYS)]
    if transport is Transport.BACKGROUND:
        way = {name: way[name] for name in IN_BACKGROUND & way.keys()}
    if transport is Transport.GENERATE:
        way = {name: value for name, value in way.items() if name != "n"}
    sampling = {"temperature": 0.0, "ignore_eos": "stop" not in way, **way}
    if transport is Transport.BACKGROUND:
        del sampling["ignore_eos"]
    ids: tuple[int, ...] = ()
    turns: tuple[str, ...] = ()
    if transport in (Transport.GENERATE, Transport.CHAT, Transport.BACKGROUND):
        lengths = (24, 12) if transport is Transport.GENERATE else (chance.choice((5, 20)),)
        turns = tuple(" ".join(chance.choice(_WORDS) for _ in range(length)) for length in lengths)
    else:
        ids = chance.choice([(), *shared]) + _ids(chance, chance.randint(8, 60))
    tenant = "public" if transport.is_bare else TENANTS[at % len(TENANTS)]
    name = f"{at}-{transport.value.replace(' ', '-')}"
    return Case(name, transport, MODEL, tenant, chance.choice(_LENGTHS), sampling, ids, turns, 0, LIMIT_S)


def requests(seed: int) -> list[Request]:
    chance, known, made = random.Random(f"{seed} requests"), cases(), []
    for _ in range(REQUESTS):
        case = chance.choice(known)
        transport = case.transport
        behaviour = Behaviour.draw(
            chance, is_http=transport.is_http, is_plain=transport.is_bare or transport is Transport.BACKGROUND
        )
        if transport is Transport.GENERATE and behaviour.whole:
            behaviour = PLAIN
        deletes = transport in (Transport.GENERATE, Transport.BACKGROUND) and chance.random() < 0.6
        if deletes:  # a text of its own: what others have too stays
            number = len(made)
            turns = (text_of(2 * number, 12), text_of(2 * number + 1, 6))[: len(case.turns)]
            case, behaviour = replace(case, name=f"deleted-{number}", turns=turns), PLAIN
            if transport is Transport.GENERATE and chance.random() < 0.3:
                behaviour = Behaviour("leaves", leaves_after=chance.randint(1, 20))
        made.append(Request(chance.uniform(0.0, LOAD_S), case, behaviour, deletes))
    return made


def text_of(number: int, words: int) -> str:
    """A text like no other in the run; `number` from 0 on."""
    return " ".join(f"{number}x{at}q{(number * 7919 + at * 104729) % 99991}" for at in range(words))


def _ids(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(10, 1000) for _ in range(count))
