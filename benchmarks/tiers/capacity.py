"""Conversations whose KV is four times what the device holds: with host and vault below it, against the device alone.

    python -m benchmarks.capacity [--quick] [--threads N]

Random weights in the shape of Qwen2-0.5B (bf16), one engine each way in this process, the vault in another. 16
sessions, each begun with 960 tokens; a turn is 64 new tokens in and 16 out. Four sessions are in a turn at any time;
the think time of one is that of the twelve others' turns, in a fixed rotation, which is what a cache that is too small
likes least. The device holds a quarter of what all sessions have at the end, the host half, and both ways keep their
prefix cache. Nothing is offloaded before it was seen that conversations go on, so the first two turns are not counted.
The value is the ratio of tokens served (prompts and outputs of the later turns) per second, median of the rounds; hits
by tier explain it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from random import Random
from statistics import median

from benchmarks.engine._engine import BLOCK, CORES, fresh_prompts
from benchmarks.engine._engine_models import model_folder
from benchmarks.harness.report import finish, parser, progress
from benchmarks.tiers._tiered import TieredOurs
from benchmarks.tiers._vault import Vault
from kvfleet.worker.port.outputs import SequenceStarted
from kvproto.messages import ChoiceFinished, Tokens

SESSIONS, AT_ONCE = 16, 4
BEGIN, NEW, OUT = 960, 64, 16
FLOOR = 3.0
FIRST = 2  # turns that are not counted


class Served:
    """What one way served: tokens of the turns that count, and where their prompts' tokens were found."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.prompt_tokens = 0
        self.found: Counter[str] = Counter()


def converse(ours: TieredOurs, turns: int, seed: int) -> Served:
    """All sessions' turns in rotation, AT_ONCE of them at a time."""
    chance = Random(seed)
    histories = fresh_prompts(chance, SESSIONS, BEGIN, ours.vocab_size)
    order = deque((turn, session) for turn in range(FIRST + turns) for session in range(SESSIONS))
    running: dict[str, tuple[int, int]] = {}
    served = Served()
    began = 0.0
    while order or running:
        while order and len(running) < AT_ONCE and order[0][1] not in {session for _, session in running.values()}:
            turn, session = order.popleft()
            if turn == FIRST and not began:
                began = time.perf_counter()
            if turn:
                histories[session] += fresh_prompts(chance, 1, NEW, ours.vocab_size)[0]
            running[ours.add(histories[session], OUT)] = turn, session
        result = ours.turn()
        for output in result.outputs if result is not None else ():
            turn, session = running[output.request]
            if isinstance(output, Tokens):
                histories[session] += output.ids
                served.tokens += len(output.ids) if turn >= FIRST else 0
            elif isinstance(output, SequenceStarted) and turn >= FIRST:
                below = {tier.value: count for tier, count in output.restored.items()}
                served.found.update(below)
                served.found["device"] += output.cached_tokens - sum(below.values())
                served.prompt_tokens += output.prompt_tokens
            elif isinstance(output, ChoiceFinished):
                del running[output.request]
    served.seconds = time.perf_counter() - began
    served.tokens += served.prompt_tokens
    return served


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    options = arguments.parse_args()
    turns = 1 if options.quick else 3
    rounds = 1 if options.quick else 3
    working_set = SESSIONS * (BEGIN + (FIRST + turns - 1) * (NEW + OUT) + OUT) // BLOCK
    device = working_set // 4
    folder = model_folder("qwen2-0.5b", "bfloat16")
    shape = {"context": 4096, "sequences": AT_ONCE, "threads": options.threads, "device_blocks": device}
    ways: dict[str, list[Served]] = {"device": [], "tiers": []}
    for number in range(rounds):
        with Vault(4 << 30) as vault:
            for way in ways:
                tiered = {"host_blocks": working_set // 2, "vault": vault} if way == "tiers" else {}
                ours = TieredOurs(folder, "bfloat16", **shape, **tiered)  # type: ignore[arg-type]
                ours.generate(fresh_prompts(Random(99), 1, 256, ours.vocab_size), 4)
                served = converse(ours, turns, number)
                ways[way].append(served)
                ours.close()
                shares = {tier: round(count / served.prompt_tokens, 3) for tier, count in served.found.items()}
                progress(f"round {number + 1}, {way}: {served.tokens / served.seconds:.0f} tokens/s, found {shares}")
    ratios = [
        tiers.tokens / tiers.seconds / (alone.tokens / alone.seconds)
        for alone, tiers in zip(ways["device"], ways["tiers"], strict=True)
    ]
    hits = {}
    for way, rounds_of in ways.items():
        found: Counter[str] = sum((one.found for one in rounds_of), Counter())
        prompts = sum(one.prompt_tokens for one in rounds_of)
        hits[way] = {tier: round(count / prompts, 4) for tier, count in sorted(found.items())}
    finish(
        "capacity",
        round(median(ratios), 2),
        "times the tokens/s of the device alone",
        floor=FLOOR,
        ok=median(ratios) >= FLOOR,
        peer="the same engine without host and vault, prefix cache on",
        ratios=[round(ratio, 2) for ratio in ratios],
        hits_of_prompt_tokens=hits,
        device_blocks=device,
        host_blocks=working_set // 2,
        working_set_blocks=working_set,
        sessions=SESSIONS,
        at_once=AT_ONCE,
        turn_tokens_in=NEW,
        turn_tokens_out=OUT,
        turns=turns,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
