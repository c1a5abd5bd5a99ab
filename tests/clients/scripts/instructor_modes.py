"""instructor: pydantic's models from tools and from schemas, whole, partial and in lists."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import instructor
from checks import KEY, MODEL, OPENAI, run_checks
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

ASKED: Any = {
    "model": MODEL, "messages": [{"role": "user", "content": "Who goes there?"}], "seed": 7, "temperature": 0.8,
    "max_tokens": 900, "max_retries": 0,
}  # fmt: skip


class Guest(BaseModel):
    """Who stands at the gate."""

    name: Annotated[str, Field(max_length=12)]
    of: Literal["sea", "rain", "night"]
    age: Annotated[int, Field(ge=1, le=120)]


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=OPENAI, api_key=KEY), mode=mode)


def check_modes() -> Any:
    found = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        guest = client(mode).create(response_model=Guest, **ASKED)
        assert isinstance(guest, Guest)
        found[mode.value] = guest.model_dump()
    return found


def check_partial() -> Any:
    """As it grows: the last is whole."""
    found = list(client(instructor.Mode.JSON_SCHEMA).create_partial(response_model=Guest, **ASKED))
    assert len(found) > 1
    assert Guest.model_validate(found[-1].model_dump())
    return [one.model_dump() for one in found]


def check_with_completion() -> Any:
    guest, completion = client(instructor.Mode.TOOLS).create_with_completion(response_model=Guest, **ASKED)
    assert isinstance(guest, Guest)
    assert completion.usage.completion_tokens > 0
    return guest.model_dump()


async def check_async() -> Any:
    asking = instructor.from_openai(AsyncOpenAI(base_url=OPENAI, api_key=KEY), mode=instructor.Mode.TOOLS)
    guest = await asking.create(response_model=Guest, **ASKED)
    assert isinstance(guest, Guest)
    return guest.model_dump()


if __name__ == "__main__":
    run_checks(globals())
