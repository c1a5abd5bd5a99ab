"""Routes for texts and tokens, as vLLM's servers have them: POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson

from kvfleet.ingress.fleet import report
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.http.limit_headers import limit_headers
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.prompts.models import ServedModel
from kvfleet.ingress.prompts.prompts import Prompts
from kvfleet.ingress.requests.bodies import check_vocabulary
from kvfleet.ingress.requests.fields import parse_body
from kvfleet.ingress.requests.texts import DETOKENIZE, TOKENIZE
from kvproto.errors import InvalidRequest


@dataclass(eq=False, slots=True)
class TextRoutes:
    """Owned by the event loop. Each counts as a request."""

    parts: IngressParts
    prompts: Prompts

    async def tokenize(self, exchange: Exchange) -> None:
        ask = TOKENIZE.read(await self._body(exchange))
        if (ask.prompt is None) == (not ask.messages):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        model = await self._model(ask.model)
        if ask.prompt is not None:
            begins = ask.add_special_tokens is not False
            ids = await self.prompts.plain(model, ask.prompt, begins=begins, must_fit=False)
        else:
            values = ask.chat_template_kwargs | ({"tools": [*ask.tools]} if ask.tools else {})
            tenant = exchange.caller.tenant if exchange.caller is not None else ""
            ids = (await self.prompts.chat(model, tenant, ask.messages, (), values, must_fit=False)).ids
        spelled = model.tokenizer.spelling.text_of
        words = [spelled(token) for token in ids] if ask.return_token_strs else None
        answer = report.TokenizeAnswer(len(ids), model.bundle.context_length, [*ids], words)
        await exchange.respond(200, orjson.dumps(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        ask = DETOKENIZE.read(await self._body(exchange))
        model = await self._model(ask.model)
        check_vocabulary(ask.tokens, model.bundle.vocab_size, "tokens")
        text = await asyncio.to_thread(model.tokenizer.decode, ask.tokens)
        await exchange.respond(200, orjson.dumps(report.DetokenizeAnswer(text)))

    async def _body(self, exchange: Exchange) -> dict[str, Any]:
        caller = exchange.caller = await self.parts.tenancy.identify(exchange)
        now, admission = asyncio.get_running_loop().time, self.parts.admission
        exchange.more_headers = lambda: limit_headers(admission.limiter, caller, now(), admission.unix_s())
        admission.meter(caller, now())
        return parse_body(await exchange.read_body(self.parts.config.max_body_bytes, self.parts.config.body_timeout_s))

    async def _model(self, name: str | None) -> ServedModel:
        return await self.parts.models.get(name or self.parts.models.default_name())
