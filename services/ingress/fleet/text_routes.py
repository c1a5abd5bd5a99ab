"""Routes for texts and tokens, as vLLM's servers have them, and Anthropic's count of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import orjson

from kvfleet.ingress.answers.anthropic_answers import ID_HEADERS, message_error
from kvfleet.ingress.fleet import report
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.prompts.models import ServedModel
from kvfleet.ingress.prompts.prompts import Prompts
from kvfleet.ingress.requests.anthropic import read_count
from kvfleet.ingress.requests.bodies import check_vocabulary
from kvfleet.ingress.requests.texts import DETOKENIZE, TOKENIZE
from kvproto.errors import InvalidRequest
from kvservice.fields import Body, parse_body

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class TextRoutes:
    """Owned by the event loop. Each counts as a request."""

    parts: IngressParts
    prompts: Prompts

    async def tokenize(self, exchange: Exchange) -> None:
        caller, ask = await self._ask(exchange, TOKENIZE.read)
        if (ask.prompt is None) == (not ask.messages):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        model = await self._model(ask.model)
        if ask.prompt is not None:
            begins = ask.add_special_tokens is not False
            ids = await self.prompts.plain(model, ask.prompt, begins=begins, must_fit=False)
        else:
            values = ask.chat_template_kwargs | ({"tools": [*ask.tools]} if ask.tools else {})
            ids = (await self.prompts.chat(model, caller.tenant, ask.messages, (), values, must_fit=False)).ids

        def told() -> bytes:
            words = [*map(model.tokenizer.spelling.text_of, ids)] if ask.return_token_strs else None
            return orjson.dumps(report.TokenizeAnswer(len(ids), model.bundle.context_length, [*ids], words))

        await exchange.respond(200, await asyncio.to_thread(told))

    async def count_tokens(self, exchange: Exchange) -> None:
        """POST /v1/messages/count_tokens, as Anthropic's."""
        exchange.error_form, exchange.id_headers = message_error, ID_HEADERS
        caller, ask = await self._ask(exchange, read_count)
        model = await self._model(ask.model)
        prompt = await self.prompts.chat(model, caller.tenant, ask.messages, (), ask.template_values, must_fit=False)
        await exchange.respond(200, orjson.dumps(report.CountAnswer(len(prompt.ids))))

    async def detokenize(self, exchange: Exchange) -> None:
        _, ask = await self._ask(exchange, DETOKENIZE.read)
        model = await self._model(ask.model)

        def told() -> bytes:
            check_vocabulary(ask.tokens, model.bundle.vocab_size, "tokens")
            return orjson.dumps(report.DetokenizeAnswer(model.tokenizer.decode(ask.tokens)))

        await exchange.respond(200, await asyncio.to_thread(told))

    async def _ask(self, exchange: Exchange, read: Callable[[Body], T]) -> tuple[Caller, T]:
        """Read on a thread, as all that is long here: tokens of others go on meanwhile."""
        caller, config = await self.parts.metered(exchange), self.parts.config
        data = await exchange.read_body(config.max_body_bytes, config.body_timeout_s)
        return caller, await asyncio.to_thread(lambda: read(parse_body(data)))

    async def _model(self, name: str | None) -> ServedModel:
        return await self.parts.models.get(name or self.parts.models.default_name())
