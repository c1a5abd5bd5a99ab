"""Measured rates of a worker, from a running fleet or a file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfleet.cli.clients.answers import AnswerFailed, AnswerRefused, client, get, reading


class NoRates(Exception):
    """The message names what is missing."""


def how_to_measure(
    model: str, load: str, input_tokens: float, output_tokens: float, url: str | None, engine: str = "own"
) -> list[str]:
    """Lines to type. `load`: the plan's options."""
    told = shlex.quote(model)
    flag = "" if engine == "own" else f" --engine {engine}"
    fleet = [] if url is not None else [f"kvfleet up{flag} --model {told} --workers 1"]
    where = url or "http://127.0.0.1:8080"
    prompt = f"\"$(yes a | head -n {input_tokens:.0f} | tr '\\n' ' ')\""
    return [
        *fleet,
        f"kvfleet generate {prompt} --max-tokens {output_tokens:.0f} --url {where}",
        f"kvfleet plan {told}{flag} {load} --from-fleet {where}",
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one worker; None: not measured. A decode step is one with the sequences that ran then."""

    prefill_tokens_per_s: float | None = None
    decode_s: float | None = None
    kv_tokens: float | None = None
    slots: int | None = None
    hit_rate: float | None = None
    source: str = ""


def of_fleet(url: str, model: str | None, api_key: str | None, engine: str = "own") -> Measured:
    """GET /workers of a running fleet. Raises NoRates."""
    try:
        with reading(url), client(api_key) as http:
            return read(get(http, f"{url}/workers"), f"{url}/workers", model, engine)
    except AnswerRefused as error:
        raise NoRates(f"{url}: {error}") from None
    except AnswerFailed as error:
        raise NoRates(str(error)) from None


def of_file(path: Path, model: str | None, engine: str = "own") -> Measured:
    """A saved GET /workers or a heartbeat's rates; the last of several lines counts. Raises NoRates."""
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
    return read(said, str(path), model, engine)


def read(said: Mapping[str, Any], source: str, model: str | None = None, engine: str = "own") -> Measured:
    """Of several engines the workers of this one count. Pure. Raises NoRates."""
    if "prefill_tokens_per_s" in said:
        step = _mean([said.get("decode_steps_per_s")])
        return Measured(_mean([said["prefill_tokens_per_s"]]), 1 / step if step else None, source=source)
    workers = [one for one in said.values() if isinstance(one, dict) and isinstance(one.get("rates"), dict)]
    if not workers:
        raise NoRates(f"{source} has no rates of workers")
    names = {str(one.get("model")) for one in workers}
    if len(names) > 1 and model in names:
        workers = [one for one in workers if one.get("model") == model]
    elif len(names) > 1:
        raise NoRates(f"{source} has workers of {', '.join(sorted(names))}: say --model-name")
    if len({one.get("engine") for one in workers}) > 1:
        workers = [one for one in workers if one.get("engine") == engine]
    prefill = _mean(one["rates"].get("prefill_tokens_per_s") for one in workers)
    steps = _mean(one["rates"].get("decode_steps_per_s") for one in workers)
    blocks = _mean(one.get("blocks") for one in workers)
    size = _mean(one.get("block_size") for one in workers)
    slots = _mean(one.get("slots") for one in workers)
    prompt = sum(one.get("load", {}).get("prompt_tokens_total", 0) for one in workers)
    hit = sum(one.get("load", {}).get("hit_tokens_total", 0) for one in workers)
    return Measured(
        prefill,
        1 / steps if steps else None,
        blocks * size if blocks and size else None,
        int(slots) if slots else None,
        hit / prompt if prompt else None,
        f"{source}, {len(workers)} workers",
    )


def _mean(values: Iterable[Any]) -> float | None:
    """Harmonic, of those above 0."""
    known = [float(value) for value in values if isinstance(value, int | float) and value > 0]
    return len(known) / sum(1 / value for value in known) if known else None
