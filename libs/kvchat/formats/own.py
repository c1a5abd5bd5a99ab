"""The format that a model's own tokenizer describes."""

from __future__ import annotations

import json
from functools import lru_cache

from kvchat.formats.own_calls import MALFORMED
from kvchat.formats.response_schema import ResponseSchema
from kvchat.formats.response_template import ResponseTemplate


@lru_cache(maxsize=16)
def own_format(said: str) -> ResponseTemplate | ResponseSchema:
    """Of JSON, a `response_template` or a `response_schema`. Raises ValueError for what is neither."""
    try:
        value = json.loads(said)
        return ResponseTemplate(value) if "fields" in value else ResponseSchema(value)
    except MALFORMED as error:
        raise ValueError(f"cannot be read: {error}") from None
