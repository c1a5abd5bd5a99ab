"""What a worker does per second, as it was measured: by a running fleet, or in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.cli import sse


class NoRates(Exception):
    """Says what is missing, and how to come by it."""


HOW = (
    "measure it: send some prompts of the usual length to one worker (kvfleet up --workers 1 --model MODEL), then "
    "kvfleet plan ... --from-fleet URL; or say --prefill-tokens-per-s and --decode-ms"
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one worker. A decode step is that of the sequences that ran then."""

    prefill_tokens_per_s: float | None = None
    decode_s: float | None = None
    kv_tokens: float | None = None
    slots: int | None = None
    hit_rate: float | None = None
    source: str = ""


def of_fleet(url: str, model: str | None, headers: Mapping[str, str]) -> Measured:
    """GET /workers of a running fleet. Raises NoRates."""
    try:
        with httpx.Client(timeout=10.0, trust_env=False, headers=dict(headers)) as http:
            answer = http.get(f"{url}/workers")
    except httpx.HTTPError as error:
        raise NoRates(f"{url}: {error or type(error).__name__}") from None
    if answer.status_code != 200:
        raise NoRates(f"{url}: {sse.error_text(answer)}")
    return read(answer.json(), f"{url}/workers", model)


def of_file(path: Path, model: str | None) -> Measured:
    """A saved GET /workers, or one object with the fields of a heartbeat's rates; of several lines the last counts.
    Raises NoRates."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        try:
            said = json.loads("\n".join(lines))
        except ValueError:
            said = json.loads(lines[-1])
    except OSError as error:
        raise NoRates(f"{path}: {error.strerror}") from None
    except (ValueError, IndexError):
        raise NoRates(f"{path} is no JSON") from None
    if not isinstance(said, dict):
        raise NoRates(f"{path} is no JSON object")
    return read(said, str(path), model)


def read(said: Mapping[str, Any], source: str, model: str | None = None) -> Measured:
    """Pure. Raises NoRates."""
    if "prefill_tokens_per_s" in said:
        return _one(said, source)
    workers = [one for one in said.values() if isinstance(one, dict) and isinstance(one.get("rates"), dict)]
    if not workers:
        raise NoRates(f"{source} has no rates of workers")
    names = {str(one.get("model")) for one in workers}
    if len(names) > 1 and model in names:
        workers = [one for one in workers if one.get("model") == model]
    elif len(names) > 1:
        raise NoRates(f"{source} has workers of {', '.join(sorted(names))}: say --model-name")
    prefill = _mean(one["rates"].get("prefill_tokens_per_s") for one in workers)
    steps = _mean(one["rates"].get("decode_steps_per_s") for one in workers)
    if prefill is None or steps is None:
        raise NoRates(f"no worker of {source} has measured {'prefill' if prefill is None else 'decoding'} yet: {HOW}")
    blocks = _mean(one.get("blocks") for one in workers)
    size = _mean(one.get("block_size") for one in workers)
    slots = _mean(one.get("slots") for one in workers)
    prompt = sum(one.get("load", {}).get("prompt_tokens_total", 0) for one in workers)
    hit = sum(one.get("load", {}).get("hit_tokens_total", 0) for one in workers)
    return Measured(
        prefill,
        1 / steps,
        blocks * size if blocks and size else None,
        int(slots) if slots else None,
        hit / prompt if prompt else None,
        f"{source}, {len(workers)} workers",
    )


def _one(said: Mapping[str, Any], source: str) -> Measured:
    prefill, steps = _mean([said["prefill_tokens_per_s"]]), _mean([said.get("decode_steps_per_s")])
    if prefill is None or steps is None:
        missing = "prefill_tokens_per_s" if prefill is None else "decode_steps_per_s"
        raise NoRates(f"{source} has no {missing} above 0: {HOW}")
    return Measured(prefill, 1 / steps, source=source)


def _mean(values: Iterable[Any]) -> float | None:
    """Harmonic, of those above 0: a fleet is as fast as its workers are in turn."""
    known = [float(value) for value in values if isinstance(value, int | float) and value > 0]
    return len(known) / sum(1 / value for value in known) if known else None
