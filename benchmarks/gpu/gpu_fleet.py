"""A fleet of two workers on one card answers as a CPU does, also where a worker is killed.

    python -m benchmarks.gpu_fleet [--dry]

`kvfleet up` with the demo model in float32: first a worker on the CPU with the reference attention, whose answers are
kept, then two workers on the GPU. Streams run at once through the HTTP ingress, greedy ones and drawn ones with seeds.
In the middle of the first stream the worker that serves it is killed. The value is how many streams ended whole, with
the tokens of the CPU; one that parts from them at a near tie of two logits counts, and is told. Dry, the two workers
run on the CPU as well, with its compiled attention.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu._gpu import begin
from benchmarks.harness.report import finish, progress, skip

if TYPE_CHECKING:
    from tests.support.up import Up

EQUAL, NEAR_TIE = "equal", "parted at a near tie"
NAME, UNIT, PEER = "gpu_fleet", "streams equal", "a CPU's tokens"
ROOT = Path(__file__).parents[2]
TOKENS, BLOCKS = 120, 512  # of a stream, of a worker
KILL_AFTER = 20  # tokens of the first stream
NEEDED = (
    "kvfleet.cli.commands", "kvfleet.ingress.main", "kvfleet.placement.main", "kvfleet.vault.main",
    "kvfleet.worker.main", "benchmarks.harness.live_fleet", "tests.support.up",
    "httptools", "setproctitle",  # which the processes import by name
)  # fmt: skip
LIMIT_S = 150.0  # of a fleet's streams
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 1}, {"temperature": 0}, {"temperature": 0.9, "seed": 2, "top_p": 0.9},
    {"temperature": 1.1, "seed": 3, "top_k": 40, "min_p": 0.02}, {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 4, "presence_penalty": 0.5},
]  # fmt: skip


@dataclass(slots=True)
class Answer:
    """Of one stream. `first` and `last`: the workers that it began and ended with."""

    ids: list[int] = field(default_factory=list)
    first: str = ""
    last: str = ""
    error: str = ""


def main() -> None:
    asked = begin(NAME, UNIT, floor=len(WAYS), peer=PEER, doc=__doc__)
    if why := missing():
        skip(NAME, UNIT, floor=len(WAYS), peer=PEER, why=why)
    from benchmarks.harness.live_fleet import end_in_order

    end_in_order()
    expected = answers("--device=cpu", "--workers=1", "--vaults=0", attention="reference", kills=False)
    found = answers(f"--device={'cpu' if asked.dry else 'cuda'}", "--workers=2", attention="auto", kills=True)
    outcomes = [_outcome(*one) for one in zip(WAYS, found, expected, strict=True)]
    for way, outcome in zip(WAYS, outcomes, strict=True):
        progress(f"{way}: {outcome}")
    equal = sum(outcome in (EQUAL, NEAR_TIE) for outcome in outcomes)
    moved = found[0].first != found[0].last
    finish(
        NAME, equal, UNIT, floor=len(WAYS), peer=PEER, ok=equal == len(WAYS) and moved,
        gpu=None if asked.dry else torch.cuda.get_device_name(), killed=found[0].first, ended_on=found[0].last,
        near_ties=outcomes.count(NEAR_TIE), tokens=sum(len(one.ids) for one in found),
    )  # fmt: skip


def _outcome(way: dict[str, Any], ours: Answer, theirs: Answer) -> str:
    if error := ours.error or theirs.error:
        return error
    if ours.ids == theirs.ids:
        return EQUAL
    return NEAR_TIE if _is_near_tie(way, ours.ids, theirs.ids) else f"other tokens: {ours.ids} for {theirs.ids}"


def missing() -> str:
    """What a fleet wants and this machine lacks, or ""."""
    try:
        for name in NEEDED:
            import_module(name)
        from kvfleet.cli.embedded import embedded_nats
        from kvfleet.cli.embedded.processes import StartFailed
    except ModuleNotFoundError as error:
        return f"no {(error.name or '').partition('.')[0]}"
    try:
        embedded_nats.binary()
    except StartFailed:
        return "no nats-server"
    return ""


def answers(*flags: str, attention: str, kills: bool) -> list[Answer]:
    """Of a fleet with these flags."""
    from tests.support.up import Up

    env = {"KVFLEET_ATTENTION": attention, "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}
    command = [sys.executable, "-m", "kvfleet.cli.main"]
    up = Up("--port=0", "--dtype=float32", f"--blocks={BLOCKS}", *flags, env=env, kvfleet=command)
    try:
        up.wait_ready()
        progress(f"{' '.join(flags)}: ready")
        return asyncio.run(_streams(up, kills=kills))
    finally:
        up.stop(timeout_s=60)


async def _streams(up: Up, *, kills: bool) -> list[Answer]:
    pids = _pids(up) if kills else {}  # known before, so that the stream is not over by then
    at_once = (_stream(up, way, {} if at else pids) for at, way in enumerate(WAYS))
    return await asyncio.wait_for(asyncio.gather(*at_once), LIMIT_S)


async def _stream(up: Up, way: dict[str, Any], killed: Mapping[str, int]) -> Answer:
    from benchmarks.harness.live_fleet import sse

    answer = Answer()
    body = {"prompt": _prompt(way), "max_tokens": TOKENS, "ignore_eos": True, **way}
    async for event in sse(up.base, "/generate", body):
        if event["type"] == "start":
            answer.first = event["worker_id"]
        elif event["type"] == "token":
            answer.ids.append(event["token_id"])
            if killed and len(answer.ids) == KILL_AFTER:
                os.kill(killed[answer.first], signal.SIGKILL)
        elif event["type"] == "done":
            answer.last = event["worker_id"]
        else:
            answer.error = f"{event['code']}: {event['error']}"
    if not answer.last and not answer.error:
        answer.error = "it ended without a last event"
    return answer


def _pids(up: Up) -> dict[str, int]:
    import httpx

    workers = httpx.get(f"{up.base}/workers", trust_env=False, timeout=10).json()
    return {worker: one["pid"] for worker, one in workers.items()}


def _prompt(way: dict[str, Any]) -> str:
    return f"Speaker {WAYS.index(way)}:\n" + "What light through yonder window breaks? " * 4


def _is_near_tie(way: dict[str, Any], one: Sequence[int], other: Sequence[int]) -> bool:
    from tokenizers import Tokenizer

    from kvfleet.worker.model.model_folder import DEMO_FOLDER
    from kvproto.messages import Sampling
    from tests.support.near_ties import is_near_tie

    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    prompt = tokenizer.encode(_prompt(way), add_special_tokens=True).ids
    return is_near_tie(prompt, Sampling(TOKENS, ignore_eos=True, **way), 0, one, other)


if __name__ == "__main__":
    main()
