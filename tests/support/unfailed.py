"""What the fake model answers greedily when nothing fails, computed without a fleet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from kvfleet.worker.model.fake import FakeRunner, _value
from kvfleet.worker.model.model_folder import DEMO_FOLDER


@cache
def _runner() -> FakeRunner:
    vocabulary = int(json.loads((DEMO_FOLDER / "config.json").read_text())["vocab_size"])
    return FakeRunner(num_blocks=2, vocab_size=vocabulary)


def unfailed(prompt: Sequence[int], tokens: int) -> list[int]:
    """Ids that follow `prompt` in a fleet of workers with the demo's folder and the fake runner."""
    seen = sum(_value(token, position) for position, token in enumerate(prompt))
    ids: list[int] = []
    while len(ids) < tokens:
        ids.append(_runner()._hashed(seen))
        seen += _value(ids[-1], len(prompt) + len(ids) - 1)
    return ids
