"""What tiers cost where nothing is ever asked for again: tokens/s with host and vault, against the device alone.

    python -m benchmarks.zero_reuse [--quick] [--threads N]

Random weights in the shape of Qwen2-0.5B (bf16), both engines in this process, the vault in another. Eight prompts of
512 random tokens at a time, 32 tokens out of each; the device holds two such batches, so that blocks are evicted all
the time. The engines take turns, each pair of batches gives a ratio, the value is the median.
"""

from __future__ import annotations

from random import Random
from statistics import median

from benchmarks.engine._engine import BLOCK, CORES, fresh_prompts
from benchmarks.engine._engine_models import model_folder
from benchmarks.harness.report import finish, parser, progress
from benchmarks.tiers._tiered import TieredOurs
from benchmarks.tiers._vault import Vault

PROMPTS, PROMPT, OUT = 8, 512, 32
FLOOR = 0.98


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    options = arguments.parse_args()
    folder = model_folder("qwen2-0.5b", "bfloat16")
    blocks = 2 * PROMPTS * -(-(PROMPT + OUT) // BLOCK)
    shape = {"context": 1024, "sequences": PROMPTS, "threads": options.threads, "device_blocks": blocks}
    chance = Random(0)
    ratios = []
    with Vault(2 << 30) as vault:
        plain = TieredOurs(folder, "bfloat16", **shape)
        tiered = TieredOurs(folder, "bfloat16", host_blocks=4 * blocks, vault=vault, **shape)
        for ours in (plain, tiered):
            ours.generate(fresh_prompts(chance, PROMPTS, PROMPT, ours.vocab_size), 4)
        for number in range(4 if options.quick else 12):
            rates = {}
            for way in ("plain", "tiered") if number % 2 else ("tiered", "plain"):
                ours = tiered if way == "tiered" else plain
                run = ours.generate(fresh_prompts(chance, PROMPTS, PROMPT, ours.vocab_size), OUT)
                rates[way] = PROMPTS * (PROMPT + OUT) / run.seconds
            ratios.append(rates["tiered"] / rates["plain"])
            shown = f"{rates['tiered']:.0f} tokens/s, alone {rates['plain']:.0f}"
            progress(f"round {number + 1}: {shown}: {ratios[-1]:.3f}")
        offloaded = tiered.tiers.loads()["host"].offloaded_blocks_total
        tiered.close()
        plain.close()
    finish(
        "zero_reuse",
        round(median(ratios), 4),
        "times the tokens/s without tiers",
        floor=FLOOR,
        ok=median(ratios) >= FLOOR,
        peer="the same engine without host and vault",
        ratios=[round(ratio, 3) for ratio in ratios],
        offloaded_blocks=offloaded,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
