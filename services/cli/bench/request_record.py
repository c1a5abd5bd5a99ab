"""What is known of each request when it has ended, and a run of them as a file of JSON lines.

The first line tells of the run; each further line is a request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "kvfleet bench 1"


class NoSavedRun(Exception):
    """The file is no run that this version reads; one line."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times in seconds; `due_s` is since the run's start, the others since the request was due."""

    session: int
    turn: int
    due_s: float
    late_s: float  # until it was sent: what this client, or its own limit of requests at once, made it wait
    error: str = ""  # its kind; "": none
    told: str = ""  # what the server, or the system, said of it
    ttft_s: float = 0.0  # without an error
    e2e_s: float = 0.0
    gaps_s: tuple[float, ...] = field(default=(), repr=False)  # between events with text
    output_tokens: int = 0
    prompt_tokens: int | None = None  # None: the server does not tell
    cached_tokens: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The same request has the same one in every run of its plan."""
        return self.session, self.turn

    @property
    def itl_s(self) -> float | None:
        """The mean time of a token after the first, however the tokens were bundled; None without such tokens."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class SavedRun:
    about: Mapping[str, Any]  # url, model, shape and what else was asked for
    duration_s: float
    records: tuple[RequestRecord, ...]

    @property
    def name(self) -> str:
        return f"{self.about.get('model', '?')} at {self.about.get('url', '?')}"


def save(path: Path, run: SavedRun) -> None:
    """Raises OSError."""
    head = {"format": FORMAT, **run.about, "duration_s": run.duration_s}
    with path.open("w") as file:
        for line in (head, *(_written(record) for record in run.records)):
            file.write(json.dumps(line) + "\n")


def _written(record: RequestRecord) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in asdict(record).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [round(one, 6) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def load(path: Path) -> SavedRun:
    """Raises NoSavedRun and OSError."""
    try:
        with path.open() as lines:
            return parse(lines)
    except (UnicodeDecodeError, NoSavedRun) as error:
        raise NoSavedRun(f"{path}: {error}") from None


def parse(lines: Iterable[str]) -> SavedRun:
    """Raises NoSavedRun."""
    about: dict[str, Any] = {}
    records = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if number > 1:
                records.append(RequestRecord(**{**value, "gaps_s": tuple(map(float, value["gaps_s"]))}))
            elif value["format"] != FORMAT:
                raise ValueError(value["format"])
            else:
                about = value
                duration_s = float(value["duration_s"])
        except (ValueError, TypeError, LookupError) as error:
            raise NoSavedRun(f"line {number} is not of a run that `kvfleet bench --output` saved: {error}") from None
    if not about:
        raise NoSavedRun("it is empty")
    return SavedRun(about, duration_s, tuple(records))
