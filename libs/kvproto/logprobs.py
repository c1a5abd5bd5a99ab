"""Log probabilities on the wire: positional, `[logprob, [id...], [logprob...]]` per token, finite. Pure.

A token that a model cannot produce has minus infinity, which JSON cannot carry: it travels as -9999, which is what
OpenAI writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvproto.errors import CodecError
from kvproto.messages import TokenLogprobs

FLOOR = -9999.0


def floored(logprobs: TokenLogprobs) -> TokenLogprobs:
    """No value below the floor; what is not a number is put on it."""
    tops = tuple(max(FLOOR, value) for value in logprobs.top_logprobs)
    return TokenLogprobs(max(FLOOR, logprobs.logprob), logprobs.top_ids, tops)


def logprob_rows(logprobs: Sequence[TokenLogprobs]) -> list[Any]:
    """One row per token; values as in `floored`."""
    return [
        [max(FLOOR, one.logprob), one.top_ids, [max(FLOOR, value) for value in one.top_logprobs]] for one in logprobs
    ]


def read_logprobs(rows: Any, tokens: int, field: str) -> tuple[TokenLogprobs, ...]:
    """Inverse of `logprob_rows`: none at all, or one per token. Raises CodecError."""
    if type(rows) is not list or len(rows) not in (0, tokens):
        raise CodecError("wrong type or length", field=field)
    return tuple(_read(row, field) for row in rows)


def _read(row: Any, field: str) -> TokenLogprobs:
    if type(row) is not list or len(row) < 3:
        raise CodecError("wrong shape", field=field)
    logprob, ids, values = row[:3]
    if type(ids) is not list or type(values) is not list or len(ids) != len(values):
        raise CodecError("wrong type or length", field=field)
    if any(type(token) is not int for token in ids):
        raise CodecError("wrong type", field=field)
    return TokenLogprobs(_number(logprob, field), tuple(ids), tuple(_number(value, field) for value in values))


def _number(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CodecError("must be a finite number", field=field)
    return float(value)
