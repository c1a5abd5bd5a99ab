"""Two engines measured in turn: the common command line, the peer that runs only while asked, and the verdict.

A benchmark with several parts (models, kinds of work) reports each; its `value` is the part that is nearest to its
floor, or furthest below. A part is kept if ours is so many times as fast as the peer, or reaches so large a share of
what this machine can do at all: where the peer is near the machine's bound, there is nothing to win. A part whose
peer is absent or gives up is skipped, with the peer's last words.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks.engine._engine import BLOCK, CORES, NO_HURRY, Measured, OurRun, Ours, Weights
from benchmarks.engine._engine_models import NATIVE, Dtype, Name
from benchmarks.engine._exact import Referee, Wrong
from benchmarks.harness.peers import NOT_OURS, Peer
from benchmarks.harness.peers import Name as PeerName
from benchmarks.harness.report import finish, parser, progress, skip, spread
from benchmarks.harness.yardstick_machine import SHARE, Machine

MODELS: dict[str, Name] = {"gpt2": "gpt2", "qwen": "qwen2-0.5b"}
LAST_WORDS = 500  # characters of them
SHORT: dict[str, str] = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison: how many times as fast ours is. `wrong` tokens fail it whatever its ratio.

    `share`: of the machine's bound (`yardstick_machine`) that ours reaches; None: it has none that is known.
    """

    name: str
    ratio: float
    floor: float
    details: Mapping[str, Any] = field(default_factory=dict)
    wrong: tuple[Wrong, ...] = ()
    share: float | None = None
    share_floor: float = SHARE

    @property
    def ok(self) -> bool:
        near_the_bound = self.share is not None and self.share >= self.share_floor
        return (self.ratio >= self.floor or near_the_bound) and not self.wrong

    def report(self) -> dict[str, Any]:
        wrong = {"wrong": [str(each) for each in self.wrong]} if self.wrong else {}
        bound = {} if self.share is None else {"of_bound": round(self.share, 3), "of_bound_floor": self.share_floor}
        return {"ratio": round(self.ratio, 3), "floor": self.floor, **bound, "ok": self.ok, **self.details, **wrong}


class Trials:
    """The parts of a benchmark, and those that could not be measured for a reason that is not ours."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.skipped: dict[str, str] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """In here the part, or parts, called `name` are measured and added."""
        try:
            yield
        except NOT_OURS as error:
            self.skipped[name] = str(error)[-LAST_WORDS:]
            progress(f"{name}: skipped: {self.skipped[name]}")


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
    name: str,
    floor: float,
    ours: Iterable[float],
    theirs: Iterable[float],
    wrong: Iterable[Wrong] = (),
    *,
    bound_s: float | None = None,
    share_floor: float = SHARE,
    **details: Any,
) -> Part:
    """From seconds of both: the ratio of the medians. `bound_s`: what ours take at least on this machine."""
    our, their = list(ours), list(theirs)
    ratio = median(their) / median(our)
    share = None if bound_s is None else bound_s / median(our)
    of_bound = "" if share is None else f", {share:.2f} of this machine's bound"
    progress(f"{name}: {ratio:.2f} times (ours {median(our):.4f} s, the peer's {median(their):.4f} s){of_bound}")
    details |= {"ours_s": spread(our), "peer_s": spread(their)}
    return Part(name, ratio, floor, details, tuple(wrong), share, share_floor)


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
    machine: Machine | None = None,
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
    bound = None
    if machine is not None:
        bound = median(bound_s(our, ours.weights, machine, seconds) for our, _ in runs)
    times = [seconds(our) for our, _ in runs], [seconds(their) for _, their in runs]
    return compare(name, floor, *times, wrong, bound_s=bound)


def bound_s(run: OurRun, weights: Weights, machine: Machine, seconds: Callable[[Measured], float]) -> float:
    """What `seconds` of the run would be at the machine's rates."""
    if seconds is first_token:
        return weights.bound_s(machine, (step for step in run.steps if step.ended <= run.ttft_s[0]))
    if seconds is per_token:
        after = [step for step in run.steps if step.ended > run.ttft_s[0]]
        return weights.bound_s(machine, after) / len(after)
    return weights.bound_s(machine, run.steps)


def conclude(name: str, unit: str, trials: Trials, *, floor: float, peer: str, **details: Any) -> NoReturn:
    """Print the verdict on all parts and exit. `floor` is said where none was measured."""
    parts = trials.parts
    details |= {"parts": {part.name: part.report() for part in parts}}
    if trials.skipped:
        details |= {"skipped_parts": trials.skipped}
    if all(part.ok for part in parts) and trials.skipped:
        why = "; ".join(f"{part}: {words}" for part, words in trials.skipped.items())
        skip(name, unit, floor=floor, peer=peer, why=why, **details)
    worst = min(parts, key=lambda part: (not part.wrong, part.ok, part.ratio / part.floor))
    ok = all(part.ok for part in parts)
    finish(name, round(worst.ratio, 3), unit, floor=worst.floor, ok=ok, peer=peer, **details)
