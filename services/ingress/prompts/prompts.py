"""Texts to token ids, once per request: plain prompts, and chats with ids of earlier turns. Long texts are tokenised in
an executor, so that one caller's document delays no other's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from kvchat.messages import ChatMessage, template_values
from kvfleet.ingress.prompts.chat_splice import Splice, SpliceIndex, join, match_history
from kvfleet.ingress.prompts.models import ServedModel
from kvfleet.ingress.requests.asks import prompt_too_long
from kvfleet.ingress.requests.bodies import check_vocabulary

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`exact`: the ids decode to the text, so the turn may be spliced later."""

    text: str
    ids: tuple[int, ...]
    exact: bool
    spliced: int = 0  # ids taken from earlier turns


@dataclass(eq=False, slots=True)
class Prompts:
    """Owned by the event loop; `executor` is shared with other CPU work of the process."""

    splices: SpliceIndex
    executor: Executor
    inline_chars: int

    async def plain(
        self, model: ServedModel, text: str, *, begins: bool, must_fit: bool, field: str = "prompt"
    ) -> tuple[int, ...]:
        """With the model's BOS where a sequence `begins`. Raises ContextLengthExceeded early for a text that `must_fit`
        the model's context and cannot."""
        if must_fit:
            _refuse_hopeless(model, text, 0, field)
        return await self._run(len(text), lambda: model.tokenizer.encode(text, add_special_tokens=begins))

    async def check_ids(self, model: ServedModel, ids: tuple[int, ...], field: str = "prompt") -> None:
        """Raises InvalidRequest naming the first unknown id."""
        await self._run(len(ids), lambda: check_vocabulary(ids, model.bundle.vocab_size, field))

    async def spelled(self, model: ServedModel, ids: tuple[int, ...]) -> str:
        """Their text, special tokens too."""
        return await self._run(len(ids), lambda: model.tokenizer.decode(ids))

    async def chat(
        self,
        model: ServedModel,
        tenant: str,
        messages: tuple[ChatMessage, ...],
        history: tuple[int, ...] = (),
        values: Mapping[str, Any] = {},
        *,
        must_fit: bool = True,
    ) -> ChatPrompt:
        """Render, with further `values`, splice ids of `history` or of a finished turn, tokenise the rest."""
        tokenizer = model.tokenizer
        text = tokenizer.render(template_values(messages), values)
        splice = self.splices.find(scope_of(model, tenant), text, tokenizer)
        if history:
            recorded = await self._run(len(text), lambda: match_history(history, text, tokenizer))
            if recorded is not None and (splice is None or recorded.chars > splice.chars):
                splice = recorded
        if must_fit:
            _refuse_hopeless(model, text, splice.chars if splice else 0, "messages")
        return await self._run(len(text) - (splice.chars if splice else 0), lambda: _encode(text, splice, model))

    def remember(self, model: ServedModel, tenant: str, prompt: ChatPrompt, ids: tuple[int, ...]) -> None:
        """Keep the ids of a finished turn."""
        if prompt.exact and ids:
            self.splices.remember(scope_of(model, tenant), prompt.text, prompt.ids, ids, model.tokenizer)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= self.inline_chars:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


def scope_of(model: ServedModel, tenant: str) -> str:
    """Ids of another tenant, model or tokenizer are never spliced."""
    return f"{tenant}\0{model.name}\0{model.hash}"


def _encode(text: str, splice: Splice | None, model: ServedModel) -> ChatPrompt:
    tokenizer = model.tokenizer
    if splice is not None:
        joined = join(splice, text, tokenizer)
        if joined is not None:
            return ChatPrompt(text, joined, True, len(splice.ids))
    ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written BOS where the model wants it
    return ChatPrompt(text, ids, tokenizer.decode(ids) == text)


def _refuse_hopeless(model: ServedModel, text: str, known_chars: int, field: str) -> None:
    """Raises ContextLengthExceeded for a text that cannot fit however it is tokenised."""
    least = model.tokenizer.least_tokens(text[known_chars:])
    if least >= model.bundle.context_length:
        raise prompt_too_long(model.bundle.context_length, f"at least {least}", field)
