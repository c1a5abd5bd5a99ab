"""Requests as they were recorded, read from JSON lines, plain or gzipped.

* Mooncake (FAST'25): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`, one per block of 512 tokens, each
  standing for its block and all before it;
* a ledger that placement recorded (`kvfleet placement --ledger-file`, several of them one after the other too): the
  same, with `hash_ids` as hex strings and `block_tokens`, `unix_ms`, `tenant`, `request` and `attempt` beside them. Of
  a request that was placed several times the last attempt counts. Untokenised text has no hashes.

Either may have `tool`, the tool that the answer calls: the conversation's next request comes when that has run.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproto.errors import InvalidRequest

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Row:
    """A request as it was recorded."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[str]  # names, each of its block and all before it
    session: str = ""  # "": that of the request whose blocks it begins with
    tool: str = ""  # that its answer calls, if any


def read_rows(path: Path, limit: int | None = None) -> tuple[list[Row], int]:
    """The first `limit` requests by time, and the tokens of a block. Raises InvalidRequest, which names the line, and
    OSError."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            return parse_rows(lines, limit)
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not a trace: {error}") from None


def parse_rows(lines: Iterable[str], limit: int | None = None) -> tuple[list[Row], int]:
    """Raises InvalidRequest."""
    rows: dict[tuple[str, ...], tuple[int, Row]] = {}  # by what tells requests apart
    block_tokens = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            row = _row(value)
            block = _count(value.get("block_tokens", MOONCAKE_BLOCK_TOKENS), least=1)
            key = (str(value.get("tenant", "")), str(value["request"])) if "request" in value else (str(number),)
            attempt = _count(value.get("attempt", 0))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidRequest(f"line {number} is no request of a trace: {said[:200]}") from None
        block_tokens = block_tokens or block
        if block != block_tokens:
            raise InvalidRequest(
                f"line {number} has blocks of {block} tokens, those before it of {block_tokens}: simulate each alone",
            )
        if key not in rows or rows[key][0] <= attempt:
            rows[key] = attempt, row
    if not rows:
        raise InvalidRequest("the trace is empty")
    ordered = sorted((row for _, row in rows.values()), key=lambda row: row.at_s)
    return ordered[:limit], block_tokens


def _row(value: dict[str, Any]) -> Row:
    blocks = value["hash_ids"]
    if not isinstance(blocks, list):
        raise TypeError("hash_ids is no list")
    # The clock that people read goes on where a file was continued, and is the same in the files of all replicas.
    ms = float(value["unix_ms"] if "unix_ms" in value else value["timestamp"])
    if not math.isfinite(ms):
        raise ValueError("the time is no number")
    lengths = _count(value["input_length"]), _count(value["output_length"])
    return Row(ms / 1000, *lengths, [str(one) for one in blocks], tool=str(value.get("tool") or ""))


def _count(value: Any, least: int = 0) -> int:
    count = int(value)
    if count < least:
        raise ValueError(f"{count} is less than {least}")
    return count
