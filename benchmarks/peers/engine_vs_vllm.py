"""Our engine against vLLM's CPU build, on the same weights: throughput, prefill, cached TTFT, and start.

    python -m benchmarks.engine_vs_vllm [--quick] [--model gpt2|qwen] [--threads N] [--itl-target-s S]

| part | work | counted |
| --- | --- | --- |
| throughput | 16 prompts of 128 tokens at once, 64 tokens out of each | seconds |
| prefill | one prompt of 1,000 tokens | seconds to its first token |
| cached | 128 new tokens behind 768 that the engine has seen | seconds to the first token |
| start | a process that imports, loads and decodes its first tokens | seconds, kernels compiled by an earlier one |

Prompts are random and, the cached 768 aside, new in every round. vLLM is stopped while ours runs. The full form also
starts both with nothing compiled; that is reported, and has no floor: vLLM compiles for minutes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.engine._engine import Ours, fresh_prompts
from benchmarks.engine._engine_models import NATIVE, Name, model_folder
from benchmarks.engine._exact import Referee
from benchmarks.engine._versus import (
    Part,
    Rival,
    Trials,
    compare,
    conclude,
    first_token,
    label,
    options_of,
    race,
    total,
)
from benchmarks.harness.peers import Peer, interpreter
from benchmarks.harness.report import progress
from benchmarks.harness.yardstick_machine import Machine, measure_machine
from benchmarks.peers._start import seconds_to_start

NAME, UNIT, FLOOR = "engine_vs_vllm", "times as fast", 0.9
STREAMS, PROMPT, OUTPUT = 16, 128, 64
LONG, KNOWN, NEW = 1_000, 768, 128


def measure(model: Name, machine: Machine, itl_target_s: float, *, quick: bool) -> tuple[list[Part], str]:
    folder, dtype, threads = model_folder(model), NATIVE[model], machine.threads
    interpreter("vllm")  # nothing is loaded where it is absent
    referee = Referee(folder, dtype)
    chance = Random(2)
    ours = Ours(folder, dtype, threads=threads, sequences=STREAMS, itl_target_s=itl_target_s)
    with Rival("vllm", folder, dtype, threads=threads, sequences=STREAMS) as rival:

        def fresh(how_many: int, length: int) -> list[list[int]]:
            return fresh_prompts(chance, how_many, length, ours.vocab_size)

        def part(what: str, works: list[list[list[int]]], tokens: int, known: int = 0) -> Part:
            seconds = total if tokens > 1 else first_token
            name = f"{label(model)} {what}"
            return race(name, FLOOR, ours, rival, works, tokens, referee, seconds, known, machine)

        def on_known() -> list[list[int]]:
            known = fresh(1, KNOWN)[0]
            for engine in (ours, rival):
                engine.generate([known + fresh(1, NEW)[0]], 1)
            return [known + fresh(1, NEW)[0]]

        for engine in (ours, rival):
            engine.generate(fresh(STREAMS, PROMPT), 4)
            engine.generate(fresh(1, LONG), 1)
        parts = [
            part("throughput", [fresh(STREAMS, PROMPT) for _ in range(2 if quick else 5)], OUTPUT),
            part("prefill", [fresh(1, LONG) for _ in range(3 if quick else 7)], 1),
            part("cached", [on_known() for _ in range(3 if quick else 7)], 1, KNOWN),
        ]
        version = rival.engine
    return parts, version


def start(model: Name, threads: int, *, quick: bool) -> Part:
    """Both start again and again, in turn, one process at a time."""
    folder, dtype = model_folder(model), NATIVE[model]
    interpreter("vllm")

    def peer_start() -> float:
        began = time.perf_counter()
        with Peer("vllm", folder, dtype, threads=threads, sequences=STREAMS):
            return time.perf_counter() - began

    with tempfile.TemporaryDirectory(prefix="kernels-") as kernels:
        cold = {"ours_cold_s": round(seconds_to_start(folder, dtype, threads, STREAMS, Path(kernels)), 2)}
        pairs = [
            (seconds_to_start(folder, dtype, threads, STREAMS, Path(kernels)), peer_start())
            for _ in range(1 if quick else 3)
        ]
    if not quick:
        with nothing_compiled():
            cold["peer_cold_s"] = round(peer_start(), 2)
        progress(f"cold: {cold}")
    return compare(f"{label(model)} start", FLOOR, (our for our, _ in pairs), (their for _, their in pairs), (), **cold)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """vLLM and its compiler find empty folders."""
    names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="compiled-") as empty:
        os.environ.update({name: str(Path(empty) / name) for name in names})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def main() -> None:
    options = options_of(__doc__, batch=True)
    machine, trials, version = measure_machine(options.threads), Trials(), "vllm"
    for model in options.models:
        with trials.of(label(model)):
            measured, version = measure(model, machine, options.itl_target_s, quick=options.quick)
            trials.parts += measured
        with trials.of(f"{label(model)} start"):
            trials.parts.append(start(model, options.threads, quick=options.quick))
    middle = {"median": round(median(part.ratio for part in trials.parts), 3)} if trials.parts else {}
    conclude(
        NAME,
        UNIT,
        trials,
        floor=FLOOR,
        peer=version,
        **middle,
        machine=machine.report(),
        threads=options.threads,
        itl_target_s=options.itl_target_s,
    )


if __name__ == "__main__":
    main()
