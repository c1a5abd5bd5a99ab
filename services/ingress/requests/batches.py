"""The body of a batch. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from kvproto.errors import InvalidRequest
from kvservice.fields import BodyForm

MOST_BATCHES, MOST_FILES = 100, 10_000  # that one answer lists
WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_S = 7 * 86_400  # as the queue's age
Label = Annotated[str, Field(max_length=512)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAsk:
    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Field(pattern=rf"^{WINDOW.pattern}$")]
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] = field(
        default_factory=dict
    )


BATCH = BodyForm(BatchAsk, {"output_expires_after": None})


def seconds_of(window: str) -> int:
    """Raises InvalidRequest for more than a week."""
    found = WINDOW.fullmatch(window)
    assert found is not None
    seconds = int(found[1]) * UNITS[found[2]]
    if seconds > LONGEST_S:
        raise InvalidRequest("at most 7d", field="completion_window")
    return seconds
