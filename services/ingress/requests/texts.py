"""Bodies of /tokenize and /detokenize, as vLLM's servers have them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, StrictInt

from kvchat.messages import ChatMessage
from kvfleet.ingress.requests.bodies import MAX_MODEL_CHARS, MAX_PROMPT_CHARS
from kvservice.fields import BodyForm, Flag

ModelName = Annotated[str, Field(max_length=MAX_MODEL_CHARS)]


@dataclass(frozen=True, slots=True)
class TokenizeAsk:
    """Either `prompt` or `messages`."""

    model: ModelName | None = None
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    messages: tuple[ChatMessage, ...] = ()
    add_special_tokens: Flag | None = None
    return_token_strs: Flag = False
    tools: tuple[dict[str, Any], ...] = ()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DetokenizeAsk:
    tokens: Annotated[tuple[StrictInt, ...], Field(fail_fast=True)]
    model: ModelName | None = None


TOKENIZE = BodyForm(TokenizeAsk, {"add_generation_prompt": (True,), "continue_final_message": (False,)})
DETOKENIZE = BodyForm(DetokenizeAsk, {})
