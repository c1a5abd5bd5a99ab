"""Two engines measured in turn: the common command line, the peer that runs only while asked, and the verdict.

A benchmark with several parts (models, kinds of work) reports each; its `value` is the part that is nearest to its
floor, or furthest below.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks._engine import BLOCK, CORES, NO_HURRY, Measured, Ours
from benchmarks._engine_models import NATIVE, Dtype, Name
from benchmarks._exact import Referee, Wrong
from benchmarks._peers import Name as PeerName
from benchmarks._peers import Peer
from benchmarks._report import finish, parser, progress, spread

MODELS: dict[str, Name] = {"gpt2": "gpt2", "qwen": "qwen2-0.5b"}
SHORT: dict[str, str] = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison: how many times as fast ours is. `wrong` tokens fail it whatever its ratio."""

    name: str
    ratio: float
    floor: float
    details: Mapping[str, Any] = field(default_factory=dict)
    wrong: tuple[Wrong, ...] = ()

    @property
    def ok(self) -> bool:
        return self.ratio >= self.floor and not self.wrong

    def report(self) -> dict[str, Any]:
        wrong = {"wrong": [str(each) for each in self.wrong]} if self.wrong else {}
        return {"ratio": round(self.ratio, 3), "floor": self.floor, "ok": self.ok, **self.details, **wrong}


def options_of(description: str | None, *, batch: bool = False) -> argparse.Namespace:
    """`quick`, `threads`, and `models`: those that were asked for, of all; `itl_target_s` where a `batch` is served."""
    arguments = parser(description)
    arguments.add_argument("--model", choices=list(MODELS), help="this part only")
    arguments.add_argument("--threads", type=int, default=CORES, help="of ours and of the peer; default: all cores")
    if batch:
        arguments.add_argument("--itl-target-s", type=float, default=NO_HURRY, help="of ours; 0: a worker's default")
    options = arguments.parse_args()
    options.models = [MODELS[options.model]] if options.model else list(MODELS.values())
    return options


def label(model: Name, dtype: Dtype | None = None) -> str:
    return f"{model} {SHORT[dtype or NATIVE[model]]}"


class Rival:
    """A peer that is stopped except while it is asked. A context manager."""

    def __init__(self, name: PeerName, folder: Path, dtype: str, **options: Any) -> None:
        progress(f"starting {name} on {folder.name}")
        self.peer = Peer(name, folder, dtype, **options)
        self.peer.pause()
        self.engine = self.peer.engine

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Measured:
        self.peer.resume()
        answer = self.peer.ask({"do": "generate", "prompts": prompts, "max_tokens": max_tokens})
        self.peer.pause()
        return Measured(answer["seconds"], answer["tokens"], answer["ttft_s"])


def total(run: Measured) -> float:
    return run.seconds


def first_token(run: Measured) -> float:
    return run.ttft_s[0]


def per_token(run: Measured) -> float:
    """Of a single stream, after its first token."""
    return 1 / run.decode_per_s


def compare(
    name: str, floor: float, ours: Iterable[float], theirs: Iterable[float], wrong: Iterable[Wrong] = (), **details: Any
) -> Part:
    """From seconds of both: the ratio of the medians."""
    our, their = list(ours), list(theirs)
    ratio = median(their) / median(our)
    progress(f"{name}: {ratio:.2f} times (ours {median(our):.4f} s, the peer's {median(their):.4f} s)")
    found = tuple(wrong)
    return Part(name, ratio, floor, {**details, "ours_s": spread(our), "peer_s": spread(their)}, found)


def race(
    name: str,
    floor: float,
    ours: Ours,
    rival: Rival,
    works: list[list[list[int]]],
    max_tokens: int,
    referee: Referee,
    seconds: Callable[[Measured], float] = total,
    known: int = 0,
) -> Part:
    """Each work, a list of prompts, by ours and then by the peer; what counts is `seconds` of it.

    `known`: how many leading tokens of each prompt ours must find cached; a part of a block may match by chance.
    """
    runs = [(ours.generate(prompts, max_tokens), rival.generate(prompts, max_tokens)) for prompts in works]
    assert all(known <= cached < known + BLOCK for our, _ in runs for cached in our.cached)
    wrong = [
        each
        for prompts, (our, their) in zip(works, runs, strict=True)
        for each in referee.wrong(prompts, our.tokens, their.tokens)
    ]
    return compare(name, floor, (seconds(our) for our, _ in runs), (seconds(their) for _, their in runs), wrong)


def conclude(name: str, unit: str, parts: list[Part], *, peer: str, **details: Any) -> NoReturn:
    """Print the verdict on all parts and exit."""
    worst = min(parts, key=lambda part: (not part.wrong, part.ratio / part.floor))
    finish(
        name,
        round(worst.ratio, 3),
        unit,
        floor=worst.floor,
        ok=all(part.ok for part in parts),
        peer=peer,
        **details,
        parts={part.name: part.report() for part in parts},
    )
