"""The body of POST /generate as a frozen dataclass. Pure. Defaults are the interface's, not the model's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvfleet.ingress.requests.fields import (
    Body,
    BodyField,
    boolean,
    expected,
    ignored,
    integer,
    refuse_unserved,
    text,
    unserved,
)
from kvfleet.ingress.requests.openai_schema import MAX_CHAT_LOGPROBS, MAX_MODEL_CHARS, MAX_SEQ_ID_CHARS
from kvfleet.ingress.requests.placement_ask import ANYWHERE, PlacementAsk, PlacementFields, read_placement_ask
from kvfleet.ingress.requests.sampling_ask import SamplingAsk, SamplingFields, read_sampling
from kvproto.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 50
MAX_PROMPT_CHARS = 8_388_608


@dataclass(frozen=True, slots=True)
class GenerateAsk:
    """`seq_id` None: a new session; `model` None: the session's, else the only one that is served."""

    prompt: str
    sampling: SamplingAsk
    seq_id: str | None = None
    model: str | None = None
    placement: PlacementAsk = ANYWHERE
    exact: bool = False


def _read_n(value: Any, field: str) -> int:
    if type(value) not in (int, float):
        raise expected("an integer", value, field)
    if value != 1:
        raise InvalidRequest(f"must be 1: a session has one continuation, got {value}", field=field)
    return 1


class GenerateFields(SamplingFields, PlacementFields):
    prompt = text("prompt", MAX_PROMPT_CHARS, required=True)
    seq_id = text("seq_id", MAX_SEQ_ID_CHARS)
    model_name = text("model_name", MAX_MODEL_CHARS, empty=True)
    model = text("model", MAX_MODEL_CHARS, empty=True)
    exact = boolean("exact")
    logprobs = integer("logprobs", 0, MAX_CHAT_LOGPROBS)
    n = BodyField("n", {"const": 1}, _read_n)
    stream = unserved("stream", True)
    user = ignored("user")
    metadata = ignored("metadata")


def read_generate(body: Body) -> GenerateAsk:
    """Raises InvalidRequest naming the field."""
    fields = GenerateFields
    refuse_unserved(body, fields)
    fields.n.read(body)
    said = read_sampling(body, logprobs=fields.logprobs.read(body))
    names = fields.model_name.read(body), fields.model.read(body)
    return GenerateAsk(
        prompt=fields.prompt.need(body),
        sampling=replace(
            said,
            temperature=said.temperature if said.temperature is not None else 1.0,
            top_p=said.top_p if said.top_p is not None else 1.0,
            top_k=said.top_k if said.top_k is not None else 0,
        ),
        seq_id=fields.seq_id.read(body),
        model=names[0] or names[1] or None,
        placement=read_placement_ask(body),
        exact=fields.exact.read(body, False),
    )
