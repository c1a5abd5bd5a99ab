"""The body of POST /generate as a frozen dataclass. Pure. Defaults are the interface's, not the model's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from kvfleet.ingress.requests.fields import Body, BodyForm, Flag, Whole
from kvfleet.ingress.requests.openai_schema import MAX_CHAT_LOGPROBS, MAX_MODEL_CHARS, SeqId
from kvfleet.ingress.requests.placement_ask import ANYWHERE, PlacementAsk
from kvfleet.ingress.requests.sampling_ask import SamplingAsk

DEFAULT_MAX_TOKENS = 50
MAX_PROMPT_CHARS = 8_388_608


@dataclass(frozen=True, slots=True)
class GenerateAsk:
    """`seq_id` None: a new session; `model` None: the session's, else the only one that is served."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
    sampling: SamplingAsk
    seq_id: SeqId | None = None
    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None
    model_name: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None  # comes before `model`
    placement: PlacementAsk = ANYWHERE
    exact: Flag = False
    logprobs: Annotated[int, Whole(0, MAX_CHAT_LOGPROBS)] | None = None
    n: Annotated[int, Whole(1, 1)] = 1  # a session has one continuation


GENERATE = BodyForm(GenerateAsk, {"stream": (True,), "user": None, "metadata": None})


def read_generate(body: Body) -> GenerateAsk:
    """Raises InvalidRequest naming the field."""
    ask = GENERATE.read(body)
    said = ask.sampling
    sampling = replace(
        said,
        temperature=said.temperature if said.temperature is not None else 1.0,
        top_p=said.top_p if said.top_p is not None else 1.0,
        top_k=said.top_k or 0,
        logprobs=ask.logprobs,
    )
    return replace(ask, model=ask.model_name or ask.model or None, sampling=sampling)
