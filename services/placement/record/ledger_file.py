"""Adapter: decisions of ended requests, as JSON lines that `kvfleet simulate` reads as a trace. A line is a request of
the Mooncake format (`timestamp` in ms since the first line, `input_length`, `output_length`, `hash_ids`) with more
fields. Without the fleet key hashes do not tell tokens.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from kvfleet.placement.events import RecordDecision

log = logging.getLogger(__name__)


class LedgerFile:
    """Owned by the placement loop. A full disk costs lines, never decisions; the constructor raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._first_unix_ms: int | None = None
        self.lost_total = 0

    def write(self, record: RecordDecision) -> None:
        decision = record.decision
        if self._first_unix_ms is None:
            self._first_unix_ms = decision.unix_ms
        actual = decision.actual
        line = {
            "timestamp": max(decision.unix_ms - self._first_unix_ms, 0),
            "input_length": decision.prompt_tokens,
            "output_length": max(actual.output_tokens, 1),
            "hash_ids": [record.hashes[at : at + 16].hex() for at in range(0, len(record.hashes), 16)],
            "block_tokens": record.block_size,
            **{
                name: getattr(decision, name)
                for name in ("unix_ms", "tenant", "request", "attempt", "policy", "worker")
            },
            "expected_tokens": sum(decision.expected_hit.values()),
            "cached_tokens": None if actual.cached is None else sum(actual.cached.values()),
            "ttft_s": actual.ttft_s,
            "saved_s": actual.saved_s,
            "code": actual.code,
        }
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.lost_total += 1
            log.warning("the ledger's line is lost: %s", error)

    async def close(self) -> None:
        self._file.close()
