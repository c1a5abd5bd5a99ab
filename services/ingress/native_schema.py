"""The body of POST /generate as a frozen dataclass. Pure. Defaults are the interface's, not the model's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvproto.errors import InvalidRequest
from services.ingress.fields import Body, boolean, integer, required_text, text
from services.ingress.openai_schema import MAX_CHAT_LOGPROBS, MAX_MODEL_CHARS, read_seq_id
from services.ingress.placement_ask import ANYWHERE, PlacementAsk, read_placement_ask
from services.ingress.sampling_ask import SamplingAsk, read_sampling

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


def read_generate(body: Body) -> GenerateAsk:
    """Raises InvalidRequest naming the field."""
    said = read_sampling(body, logprobs=integer(body, "logprobs", 0, MAX_CHAT_LOGPROBS))
    if said.n != 1:
        raise InvalidRequest(f"must be 1: a session has one continuation, got {said.n}", field="n")
    return GenerateAsk(
        prompt=required_text(body, "prompt", MAX_PROMPT_CHARS),
        sampling=replace(
            said,
            temperature=said.temperature if said.temperature is not None else 1.0,
            top_p=said.top_p if said.top_p is not None else 1.0,
            top_k=said.top_k if said.top_k is not None else 0,
        ),
        seq_id=read_seq_id(body),
        model=text(body, "model_name", MAX_MODEL_CHARS) or text(body, "model", MAX_MODEL_CHARS) or None,
        placement=read_placement_ask(body),
        exact=boolean(body, "exact", False),
    )
