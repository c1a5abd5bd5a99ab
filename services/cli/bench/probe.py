"""What must be known of a server before the load: its model, fields that it refuses, how many words a token is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from random import Random

from kvfleet.cli.bench.answer_stream import AnswerStream, Meter
from kvfleet.cli.bench.connection import ConnectionBroken, StreamConnections
from kvfleet.cli.bench.load_run import BenchAsk
from kvfleet.cli.bench.shapes import text_of
from kvfleet.cli.clients.answers import AnswerFailed, client, get, reading

SHORT, LONG = 40, 240  # words; their difference leaves out what a chat template adds
USUAL_WORDS_PER_TOKEN = 0.75
REFUSED = (400, 422)


@dataclass(frozen=True)
class ProbedServer:
    ask: BenchAsk
    words_per_token: float
    tells_usage: bool


def first_model(base: str, api_key: str | None) -> str:
    """Raises AnswerFailed."""
    with client(api_key) as http, reading(base):
        models = get(http, f"{base}/v1/models")["data"]
        if not models:
            raise AnswerFailed(f"{base} has no model")
        return str(models[0]["id"])


async def probe(connections: StreamConnections, ask: BenchAsk, seed: int) -> ProbedServer:
    """Two requests of one token. Raises AnswerFailed."""
    random = Random(f"{seed} probe")
    try:
        short = await _prompt_tokens(connections, ask, text_of(random, SHORT, 1.0))
    except _Refused:  # a strict server of OpenAI's takes no field that it does not know
        ask = replace(ask, ignores_eos=False)
        short = await _prompt_tokens(connections, ask, text_of(random, SHORT, 1.0))
    long = await _prompt_tokens(connections, ask, text_of(random, LONG, 1.0))
    if short is None or long is None or long <= short:
        return ProbedServer(ask, USUAL_WORDS_PER_TOKEN, tells_usage=False)
    return ProbedServer(ask, (LONG - SHORT) / (long - short), tells_usage=True)


class _Refused(AnswerFailed):
    """By its status, a field may be the reason."""


async def _prompt_tokens(connections: StreamConnections, ask: BenchAsk, text: str) -> int | None:
    into = AnswerStream(Meter())
    try:
        async with asyncio.timeout(ask.timeout_s):
            connection = await connections.post(ask.path, ask.body([{"role": "user", "content": text}], 1), into)
    except TimeoutError:
        raise AnswerFailed(f"{connections.base}: no answer within {ask.timeout_s:g} s") from None
    except (OSError, ConnectionBroken, UnicodeError) as error:
        raise AnswerFailed(f"{connections.base}: {error or type(error).__name__}") from None
    connections.give_back(connection)
    if connection.status != 200:
        told = f"HTTP {connection.status} {connection.refusal[:200]}"
        raise (_Refused if connection.status in REFUSED else AnswerFailed)(f"{connections.base}{ask.path}: {told}")
    if into.error or into.broken or not (into.done or into.finished):
        why = into.error or into.broken or "no stream of events"
        raise AnswerFailed(f"{connections.base}{ask.path}: {why}")
    return into.count("prompt_tokens")
