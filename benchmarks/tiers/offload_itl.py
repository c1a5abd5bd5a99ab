"""Time between tokens while blocks go down as fast as they can, and while the vault stands still.

    python -m benchmarks.offload_itl [--quick] [--threads N]
    python -m benchmarks.offload_itl --device cuda [--quick] [--dry]       on a GPU, the shape of Qwen2.5-7B

Random weights in the shape of Qwen2-0.5B (bf16). Eight streams decode; beside them four cached prompts of 1,024 tokens
are sent down again and again, to the host and from there to the vault in another process, each time as if nobody had
them. Phases of two seconds without and with that alternate; then the vault stands still for ten seconds behind its
proxy while offloading goes on. The value is the ratio of the 99th percentiles of the time between two tokens of a
stream, with over without; nor may the longest step beside a vault that stands still be longer than the longest without
by more. (The longest of all is printed; on a shared machine it says what else ran.)
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engine._engine import BLOCK, CORES, ROOT, fresh_prompts
from benchmarks.engine._engine_models import model_folder
from benchmarks.harness.gpu import add_device, check_device, shape_folder, told_device
from benchmarks.harness.report import finish, parser, progress, skip
from benchmarks.tiers._tiered import TieredOurs
from benchmarks.tiers._vault import Vault
from kvfleet.worker.tiers.offloader import Chain
from kvproto.block_hash import chain
from kvproto.messages import ChoiceFinished, Tier
from tests.support.slow_proxy import SlowProxy

STREAMS, PROMPT, CACHED, CHAINS = 8, 128, 1_024, 4
PHASE_S, STALL_S = 2.0, 10.0
CONTEXT, GPU_CONTEXT = 4096, 16_384  # so that no stream ends
NAME, UNIT = "offload_itl", "times the p99 between tokens without offload, at worst"
FLOOR, PEER = 1.2, "the same engine, nothing going down"


class Streams:
    """Keeps STREAMS sequences decoding, for ever."""

    def __init__(self, ours: TieredOurs, context: int) -> None:
        self.ours, self._context = ours, context
        self._chance = Random(7)
        for _ in range(STREAMS):
            self._begin()

    def _begin(self) -> None:
        prompt = fresh_prompts(self._chance, 1, PROMPT, self.ours.vocab_size)[0]
        self.ours.add(prompt, self._context - 2 * PROMPT, looks=False)

    def phase(self, seconds: float, beside: Callable[[], None]) -> list[float]:
        """Seconds of each round in which all streams got a token, tiers tended to; what `beside` takes aside."""
        taken = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            beside()
            began = time.perf_counter()
            result = self.ours.turn()
            if result is not None and result.sequences == STREAMS and not result.prefill_tokens:
                taken.append(time.perf_counter() - began)
            outputs = result.outputs if result is not None else ()
            assert not any(isinstance(output, ChoiceFinished) for output in outputs)
        return taken


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    add_device(arguments)
    options = arguments.parse_args()
    check_device(options, NAME, UNIT, floor=FLOOR, peer=PEER)
    with TemporaryDirectory() as folder:
        measure(options, folder)


def measure(options: Namespace, made: str) -> None:
    on_gpu, dry = options.device == "cuda", options.dry
    context = GPU_CONTEXT if on_gpu and not dry else CONTEXT
    rounds = 1 if dry else 4 if options.quick else 12
    phase_s, stall_s = (0.1, 0.2) if dry else (PHASE_S, STALL_S)
    blocks = CHAINS * CACHED // BLOCK
    where: dict[str, Any] = {"load_format": "dummy", "device": "cpu" if dry else "cuda"} if on_gpu else {}
    with Vault(1 << 30) as vault, SlowProxy(vault.addresses[0]) as proxy:
        ours = TieredOurs(
            shape_folder(made, dry=dry) if on_gpu else model_folder("qwen2-0.5b", "bfloat16"),
            "float32" if dry else "bfloat16",
            context=context,
            sequences=STREAMS,
            threads=options.threads,
            host_blocks=4 * blocks,
            vault=vault,
            address=proxy.address,
            keeps_all=True,
            **where,
        )
        assert ours.remote is not None
        host, offloader, remote = ours.host, ours.tiers.offloader, ours.remote
        prompts = fresh_prompts(Random(1), CHAINS, CACHED + 1, ours.vocab_size)
        chains = [chain(ROOT, prompt, BLOCK) for prompt in prompts]
        for prompt in prompts:
            ours.generate([prompt], 1, looks=False)
        ours.settle()
        sent = 0

        def send_down() -> None:
            """Whenever nothing is on its way: forget that host and vault have the chains, and offer them again."""
            nonlocal sent
            if offloader.has_work:
                return
            for prompt, hashes in zip(prompts, chains, strict=True):
                host.erase(ROOT, hashes, prompt, 0)
                offloader.missed(hashes)
                offloader.offer_chain(Chain(ROOT, hashes, len(hashes)))
            sent += 1

        streams = Streams(ours, context)
        streams.phase(phase_s, lambda: None)
        without: list[float] = []
        with_it: list[float] = []
        for number in range(rounds):
            without += streams.phase(phase_s, lambda: None)
            before = offloader.offloaded_total
            with_it += streams.phase(phase_s, send_down)
            rate = (offloader.offloaded_total - before) * ours.runner.bytes_per_block / phase_s
            while offloader.has_work:
                ours.turn()
            progress(
                f"round {number + 1}: p99 {percentile(without, 0.99) * 1000:.1f} ms without, "
                f"{percentile(with_it, 0.99) * 1000:.1f} with {rate / 1e6:.0f} MB/s going down"
            )
        proxy.stall.set()
        stalled = streams.phase(stall_s, send_down)
        proxy.stall.clear()
        loads = remote.loads()[Tier.VAULT.value]
        ours.close()
    if dry:
        skip(NAME, UNIT, floor=FLOOR, peer=PEER, why="a dry run came to its end")
    ratios = {
        "offload": percentile(with_it, 0.99) / percentile(without, 0.99),
        "stalled": percentile(stalled, 0.99) / percentile(without, 0.99),
    }
    longest = {"without": max(without), "offload": max(with_it), "stalled": max(stalled)}
    worst = max(ratios.values())
    finish(
        NAME,
        round(worst, 3),
        UNIT,
        floor=FLOOR,
        ok=worst <= FLOOR and longest["stalled"] <= FLOOR * longest["without"],
        peer=PEER,
        ratios={way: round(ratio, 3) for way, ratio in ratios.items()},
        longest_step_ms={way: round(value * 1000, 1) for way, value in longest.items()},
        p99_ms={
            "without": round(percentile(without, 0.99) * 1000, 2),
            "offload": round(percentile(with_it, 0.99) * 1000, 2),
            "stalled": round(percentile(stalled, 0.99) * 1000, 2),
        },
        vault_failures=loads.failures_total,
        threads=options.threads,
        **told_device(options),
    )


if __name__ == "__main__":
    main()
