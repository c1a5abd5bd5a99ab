"""Decisions a second of one placement, and how long one takes over NATS.

    python -m benchmarks.placement_decisions [--quick]

In process: `PlacementCore.handle(PlaceAsked)` under the load of `_index_load`: 64 workers, a million blocks indexed,
2,048 token ids to hash, a fifth of the prompts held by nobody, the others by all to 8 depths; events are heard between
any two, and bookings go as milestones come. The value is how many decisions are made in the CPU time of one
`question`, the plain Python work of `_yardstick_placement` that is done between them: medians. Decisions a second, one
over the mean decision, are of this machine, and stand beside it with the design's floor for them; and so does what a
replica pays for a request from its bytes to its last milestone, and where a decision's time goes: shares of a profiled
run.

Over NATS: a real placement process and 64 fake workers of 16,384 blocks, 500 requests a second of the same kind, paced,
from another process; milliseconds from publishing the request to its answer.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from dataclasses import dataclass, field
from random import Random
from statistics import mean, median, quantiles
from typing import Any

import uvloop

from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.placement import _placing_load as load
from benchmarks.placement._placing_load import FullCore, TokenLoad
from benchmarks.placement._requester import Requester
from benchmarks.placement._scale_bench import scale_bench
from benchmarks.placement._yardstick_placement import Yardstick
from kvfleet.placement.events import Answer, PlaceAsked
from kvfleet.placement.io import intake
from kvproto import codec
from kvproto.messages import PlaceRequest

FLOOR = 1.1  # decisions in the time of a question
PER_S_FLOOR = 5_000.0  # the design's, of its machine: printed
P50_MS, P99_MS = 1.0, 5.0
RATE = 500.0
DISTINCT = 8
LENGTHS = (16, 128, 512, 2_048)  # blocks
BETWEEN_BEATS = 500  # decisions
BETWEEN_QUESTIONS = 5
SUBJECT = f"kvf.place.{load.TENANT}.{load.MODEL}"

# What is called from a decision and where that is; nested calls are taken off what calls them.
PARTS = {
    "hash chain": ("prompts.py", "hashes"),
    "ring key": ("affinity.py", "ring_key"),
    "index find": ("kv_indexer.py", "depths"),
    "inflight find": ("inflight_blocks.py", "depths"),
    "inflight make": ("inflight_blocks.py", "make"),
    "policy": ("cost.py", "choose"),
    "booking": ("bookings.py", "book"),
    "ledger": ("ledger.py", "note"),
    "candidates": ("ledger.py", "consider"),
    "loads": ("workloads.py", "view"),
    "heat": ("heat.py", "of"),
}


@dataclass
class Spent:
    """Seconds, one entry a decision."""

    read: list[float] = field(default_factory=list)  # bytes to event
    decide: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of `decide`, what no other process's work can add to
    answer: list[float] = field(default_factory=list)  # action to bytes
    pass_on: list[float] = field(default_factory=list)  # all its milestones
    question: list[float] = field(default_factory=list)  # the yardstick


def decide(
    full: FullCore,
    tokens: TokenLoad,
    count: int,
    first: int,
    profile: cProfile.Profile | None = None,
    yardstick: Yardstick | None = None,
) -> Spent:
    core, spent, clock = full.core, Spent(), time.perf_counter
    for number, prompt in enumerate(tokens.prompts(load.LENGTH, DISTINCT, count)):
        full.go_on()
        full.now += 1 / RATE
        ask = PlaceRequest(f"r{first + number}", load.MODEL, tokens.ids_of(prompt), max_tokens=50)
        data = codec.encode(ask)
        t0 = clock()
        event = intake.read_place(SUBJECT, "_ing.x", data)
        t1 = clock()
        assert isinstance(event, PlaceAsked)
        if profile is not None:
            profile.enable()
        c1 = time.thread_time()
        actions = core.handle(event, full.now)
        spent.cpu.append(time.thread_time() - c1)
        if profile is not None:
            profile.disable()
        t2 = clock()
        action = actions[0]
        assert isinstance(action, Answer), action
        codec.encode(action.placement)
        t3 = clock()
        assert bool(action.placement.expected_hit) >= prompt.is_hit
        milestones = load.lived(action.placement, ask)
        t4 = clock()
        for milestone in milestones:
            core.handle(milestone, full.now)
        t5 = clock()
        for seconds, several in (
            (t1 - t0, spent.read),
            (t2 - t1, spent.decide),
            (t3 - t2, spent.answer),
            (t5 - t4, spent.pass_on),
        ):
            several.append(seconds)
        if yardstick is not None and number % BETWEEN_QUESTIONS == 0:
            spent.question.append(yardstick.question_s())
        if number % BETWEEN_BEATS == 0:
            full.beat()
    return spent


def by_length(full: FullCore, count: int) -> dict[str, dict[str, float]]:
    """Mean microseconds of CPU by blocks of the prompt, of prompts that nobody has: to read it, and to decide."""
    chance, found = Random(3), {}
    for blocks in LENGTHS:
        read, decided = [], []
        for number in range(count):
            ids = tuple(chance.choices(range(load.VOCABULARY), k=blocks * load.BLOCK_SIZE))
            data = codec.encode(PlaceRequest(f"l{blocks}-{number}", load.MODEL, ids))
            c0 = time.thread_time()
            event = intake.read_place(SUBJECT, "_ing.x", data)
            c1 = time.thread_time()
            assert isinstance(event, PlaceAsked)
            full.core.handle(event, full.now)
            read.append(c1 - c0)
            decided.append(time.thread_time() - c1)
        found[str(blocks)] = {"read_us": round(mean(read) * 1e6, 1), "decide_us": round(mean(decided) * 1e6, 1)}
    progress(f"by blocks of a prompt: {found}")
    return found


def shares(profile: cProfile.Profile) -> dict[str, float]:
    """Of a decision's time, what each part takes; `rest` is what no part does."""
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    cumulative = {(path.rsplit("/", 1)[-1], name): values[3] for (path, _, name), values in stats.items()}
    total = cumulative["core.py", "handle"]
    found = {part: cumulative.get(where, 0.0) / total for part, where in PARTS.items()}
    return found | {"rest": 1 - sum(found.values())}


def in_process(count: int) -> dict[str, Any]:
    tokens, yardstick = TokenLoad(), Yardstick()
    full = FullCore(tokens)
    decide(full, tokens, 300, 0)  # compiles what is compiled, and fills what is kept
    pauses: list[float] = []
    began = 0.0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        elif info["generation"] == 2:
            pauses.append(time.perf_counter() - began)

    gc.callbacks.append(collected)
    spent = decide(full, tokens, count, 1_000, yardstick=yardstick)
    gc.callbacks.remove(collected)
    full.core.check_integrity()
    profile = cProfile.Profile()
    decide(full, tokens, count // 4, 1_000_000, profile)
    us = mean(spent.decide) * 1e6
    parts = {name: round(share * us, 1) for name, share in shares(profile).items()}
    progress(f"a decision takes {us:.0f} us: {parts}")
    whole = us + sum(mean(several) * 1e6 for several in (spent.read, spent.answer, spent.pass_on))
    return {
        "decisions_in_a_question": round(median(spent.question) / median(spent.cpu), 3),
        "question_us": round(median(spent.question) * 1e6, 1),
        "decisions_per_s": round(1e6 / us),
        "decisions_per_s_floor": PER_S_FLOOR,
        "decision_us": {
            "mean": round(us, 1),
            "mean_cpu": round(mean(spent.cpu) * 1e6, 1),
            "p50_cpu": round(median(spent.cpu) * 1e6, 1),
            "p50": round(quantiles(spent.decide, n=100)[49] * 1e6, 1),
            "p99": round(quantiles(spent.decide, n=100)[98] * 1e6, 1),
        },
        "parts_us": parts,
        "read_us": round(mean(spent.read) * 1e6, 1),
        "answer_us": round(mean(spent.answer) * 1e6, 1),
        "milestones_us": round(mean(spent.pass_on) * 1e6, 1),
        "requests_per_s_from_bytes_to_last_milestone": round(1e6 / whole),
        "longest_collection_ms": round(max(pauses, default=0.0) * 1e3, 1),
        "cpu_by_prompt_blocks": by_length(full, 50),
    }


async def over_nats(seconds: float) -> dict[str, Any]:
    async with scale_bench(64, 16_384) as bench:
        await bench.start_fleet()
        requester = await Requester.open(bench.url)
        bench.start_placement("p0")
        await bench.until_ready(requester)
        await bench.until_known(requester, 64, list(range(64)))
        await requester.paced(RATE, 2)
        meter = bench.meter()
        asked = await requester.paced(RATE, seconds)
        report = asked.report() | {"cores": meter.cores()}
        await requester.close()
    progress(f"over NATS: {report}")
    return report


def main() -> None:
    quick = parse_quick(__doc__)
    inside = in_process(2_000 if quick else 10_000)
    outside = uvloop.run(over_nats(5 if quick else 30))
    value = inside["decisions_in_a_question"]
    ok = value >= FLOOR and outside["p50_ms"] <= P50_MS and outside["p99_ms"] <= P99_MS and not outside["unanswered"]
    finish(
        "placement_decisions",
        value,
        "decisions in the CPU time of one question of plain Python",
        floor=FLOOR,
        ok=ok,
        in_process=inside,
        over_nats=outside | {"p50_floor_ms": P50_MS, "p99_floor_ms": P99_MS, "rate": RATE},
    )


if __name__ == "__main__":
    main()
