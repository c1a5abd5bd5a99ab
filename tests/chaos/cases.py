"""What clients ask for: a catalogue of requests from a seed. Pure.

Every case is asked once before anything breaks, and again and again afterwards: the answers must be the same. What a
request may vary is varied here: prompts that share prefixes, lengths, sampling, choices, stops, penalties, logprobs.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from kvproto.messages import Beams, Chat, Grammar, GrammarForm, ProducerRequest, Sampling
from tests.chaos.history import Transport
from tests.chaos.layout import FAKE, REAL, TENANTS

VOCABULARY = 1000  # ids 10 ... of both models
RETURN_S = 0.5  # every client says so: workers take blocks down and up while the fleet is broken
_WORDS = [
    "the",
    "king",
    "and",
    "his",
    "men",
    "rode",
    "to",
    "the",
    "gate",
    "of",
    "the",
    "old",
    "town",
    "where",
    "a",
    "woman",
    "sold",
    "bread",
    "for",
    "silver",
    "but",
    "nobody",
    "had",
    "any",
    "so",
    "she",
    "gave",
    "it",
    "away",
    "and",
    "said",
    "go",
    "home",
    "before",
    "night",
    "for",
    "the",
    "river",
    "will",
    "rise",
    "and",
    "take",
    "what",
    "the",
    "winter",
    "left",
    "of",
    "your",
    "fields",
    "thou",
    "art",
    "a",
    "noble",
    "lord",
    "speak",
    "again",
    "good",
    "sir",
    "my",
    "heart",
    "is",
    "heavy",
    "what",
    "news",
    "from",
    "the",
    "north",
    "none",
    "but",
    "sorrow",
    "and",
    "rain",
]


@dataclass(frozen=True, slots=True)
class Case:
    """One request, or the turns of one session. `sampling` holds fields that all transports name alike."""

    name: str
    transport: Transport
    model: str
    tenant: str
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    turns: tuple[str, ...] = ()  # texts: of one turn where the transport knows no sessions
    priority: int = 0
    limit_s: float = 40.0  # for it to end
    chat: Chat | None = None  # in place of ids and turns, of kvproto's clients

    @property
    def choices(self) -> int:
        return int(self.sampling.get("n", 1))

    @property
    def is_greedy(self) -> bool:
        return not self.sampling["temperature"]

    def sampling_of(self) -> Sampling:
        """As kvproto's clients say it."""
        said = {**self.sampling, "stop": tuple(self.sampling.get("stop", ()))}
        return Sampling(self.max_tokens, **said)

    def producer_request(self, request: str) -> ProducerRequest:
        """As a bare producer says it."""
        said = {**self.sampling, "stop": tuple(self.sampling.get("stop", ()))}
        prompt = self.turns[0] if self.turns else None
        return ProducerRequest(
            prompt=prompt,
            prompt_ids=self.ids,
            model=self.model,
            max_tokens=self.max_tokens,
            request=request,
            priority=self.priority,
            expect_return_s=RETURN_S,
            **said,
        )

    def http_body(self, turn: int, *, stream: bool, session: str = "") -> dict[str, Any]:
        """As HTTP clients say it, each route in its own words."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens, **self.sampling}
        body["kvfleet"] = {"expect_return_s": RETURN_S}
        if (grammar := body.pop("grammar", None)) is not None:
            body["structured_outputs"] = {grammar.form.removeprefix("json_").replace("schema", "json"): grammar.text}
        if (beams := body.pop("beams", None)) is not None:
            body |= {"use_beam_search": True, "best_of": beams.width}
        if self.priority:
            body["priority"] = self.priority
        if self.transport is Transport.GENERATE:
            return {**body, "prompt": self.turns[turn], "seq_id": session}
        if self.transport is Transport.CHAT:
            if (top := body.pop("logprobs", None)) is not None:
                body |= {"logprobs": True, "top_logprobs": top}
            if "tool_choice" in body:
                body["tools"] = [{"type": "function", "function": {"name": "invite", "parameters": _GUEST}}]
            messages = [{"role": "system", "content": _BOOK[:300]}, {"role": "user", "content": self.turns[0]}]
            return {**body, "messages": messages, "stream": stream}
        if self.transport is Transport.BACKGROUND:
            said = {name: body[name] for name in IN_BACKGROUND & body.keys()}
            return {**said, "input": self.turns[0], "max_output_tokens": self.max_tokens, "background": True}
        return {**body, "prompt": list(self.ids) or self.turns[0], "stream": stream}


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(words))


_BOOK = _text(random.Random(0), 400)

_GUEST = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "of": {"enum": ["sea", "rain", "night"]}},
    "required": ["name", "age", "of"],
}
IN_BACKGROUND = frozenset(("model", "priority", "kvfleet", "temperature", "seed", "top_p", "top_k", "stop"))
_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 50},
    {"n": 2, "temperature": 0.9, "seed": 3},
    {"stop": ["the", "king"]},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2, "temperature": 0.7, "seed": 4},
    {"logprobs": 2},
    {"n": 2, "stop": ["and"], "temperature": 0.8, "seed": 5, "logprobs": 1},
    {"min_tokens": 20, "ignore_eos": False, "temperature": 1.0, "seed": 6},
    {"grammar": Grammar(GrammarForm.JSON_SCHEMA, json.dumps(_GUEST)), "temperature": 1.0, "seed": 7},
    {"grammar": Grammar(GrammarForm.REGEX, "([a-z]{1,9} ){4,40}[.]"), "n": 2, "temperature": 0.9, "seed": 8},
)
_SEARCH: dict[str, Any] = {"n": 2, "beams": Beams(4)}  # of the fake model, whose ties break alike everywhere


@dataclass(frozen=True, slots=True)
class Wanted:
    """`real`, `fake`: so many cases of each model; `lengths`: of answers of the real one, in tokens."""

    real: int = 16
    fake: int = 32
    lengths: tuple[int, ...] = (8, 24, 60, 60, 100)
    limit_s: float = 40.0


def catalogue(seed: int, wanted: Wanted) -> tuple[Case, ...]:
    """Over all transports; lengths 8 to 200 tokens out of prompts of 8 to 800."""
    chance = random.Random(seed)
    prefixes = [_ids(chance, length) for length in (64, 256, 512)]  # that prompts share
    out = []
    for model, count in ((REAL, wanted.real), (FAKE, wanted.fake)):
        ways = [*_WAYS] if model == REAL else [*_WAYS, _SEARCH]
        transports: list[Transport] = []
        for at in range(count):
            if not transports:
                transports = [Transport.CLIENT, Transport.CLIENT, *Transport]
                chance.shuffle(transports)
            transport = transports.pop()
            tenant = "public" if transport.is_bare else chance.choice(TENANTS)
            way = ways[at % len(ways)]
            if transport is Transport.BACKGROUND:
                way = {name: way[name] for name in IN_BACKGROUND & way.keys()}
            if way.get("n", 1) > 1 and transport is Transport.GENERATE:
                way = {key: value for key, value in way.items() if key != "n"}
            if transport is Transport.CHAT and not way.keys() & {"stop", "grammar", "beams"}:
                way = {**way, "tool_choice": "required" if at % 2 else "auto"}
            sampling = {"temperature": 0.0, "ignore_eos": "stop" not in way, **way}
            if transport is Transport.BACKGROUND:
                del sampling["ignore_eos"]
            ids: tuple[int, ...] = ()
            turns: tuple[str, ...] = ()
            if transport in (Transport.GENERATE, Transport.CHAT, Transport.BACKGROUND) or chance.random() < 0.3:
                lengths = (40, 20) if transport is Transport.GENERATE else (chance.choice((5, 30, 120)),)
                turns = tuple(_text(chance, words) for words in lengths)
            else:
                shared = chance.choice([(), *prefixes])
                ids = shared + _ids(chance, chance.randint(8, 290))
            length = chance.choice(wanted.lengths) if model == REAL else chance.choice((8, 60, 100, 150, 200))
            name = f"{model}-{at}-{transport.value.replace(' ', '-')}"
            priority = 0 if transport.is_http else chance.choice((0, 0, 1, -1))
            if sampling.get("min_tokens", 0) > length:
                sampling["min_tokens"] = length
            out.append(Case(name, transport, model, tenant, length, sampling, ids, turns, priority, wanted.limit_s))
    return tuple(out)


def canary(chance: random.Random, tenant: str, model: str) -> Case:
    """A prompt that nobody has ever asked for."""
    return Case("canary", Transport.COMPLETIONS, model, tenant, 4, {"temperature": 0.0}, _ids(chance, 80))


def _ids(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(10, VOCABULARY) for _ in range(count))
