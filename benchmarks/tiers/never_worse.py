"""A vault that is slow must not make a request slower than no vault: first token, against computing everything.

    python -m benchmarks.never_worse [--quick] [--threads N]

A small model (fp32), so that 8,000 tokens take seconds here; the vault in another process, behind a proxy that lets
through as much per second as the vault gives at full speed, divided by 1, 3, 10, 30 and 100. Prompts of 16 to 8,000
tokens that the vault has and nobody else. With and without asking the vault in turn, each first every other time, nine
times; those of a few milliseconds five times as often. The value is the worst ratio of medians. What the engine
believes of the link it has measured by itself, by probes and by what it fetched.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.engine._engine import CORES, fresh_prompts
from benchmarks.engine._engine_models import small_config
from benchmarks.harness.report import finish, parser, progress
from benchmarks.tiers._tiered import TieredOurs
from benchmarks.tiers._vault import Vault
from kvproto.messages import Tier
from tests.support.slow_proxy import SlowProxy

LENGTHS = (16, 64, 250, 1_000, 3_000, 8_000)
SLOWER = (1, 3, 10, 30, 100)
FLOOR = 1.1
REPEATS, SHORT_REPEATS, SHORT = 9, 45, 100  # of at most so many tokens


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    options = arguments.parse_args()
    lengths = (16, 250, 3_000) if options.quick else LENGTHS
    slower = (1, 30, 100) if options.quick else SLOWER
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as made, Vault(2 << 30) as vault, SlowProxy(vault.addresses[0]) as proxy:
        ours = TieredOurs(
            small_config(Path(made)),
            "float32",
            context=lengths[-1] + 32,
            sequences=1,
            threads=options.threads,
            host_blocks=lengths[-1] // 16 + 64,
            vault=vault,
            address=proxy.address,
            keeps_all=True,
            load_format="dummy",
        )
        assert ours.remote is not None
        prompts = {length: fresh_prompts(Random(length), 1, length, ours.vocab_size)[0] for length in lengths}
        for prompt in prompts.values():  # the vault gets them all
            ours.generate([prompt], 1)
            ours.flush(Tier.DEVICE, Tier.HOST)
        speed = ours.remote.speed(Tier.VAULT)
        assert speed is not None
        full = speed.bytes_per_s
        for factor in slower:
            proxy.bytes_per_s = None if factor == 1 else full / factor
            for length, prompt in prompts.items():
                seconds: dict[bool, list[float]] = {True: [], False: []}
                restored = 0
                repeats = SHORT_REPEATS if length <= SHORT else REPEATS
                for number in range(repeats):
                    for looks in (True, False) if number % 2 else (False, True):
                        ours.flush(Tier.DEVICE, Tier.HOST)
                        time.sleep(0.02)
                        seconds[looks].append(ours.generate([prompt], 1, looks=looks).ttft_s[0])
                        restored += ours.restored[0].get(Tier.VAULT, 0) if looks else 0
                ratio = median(seconds[True]) / median(seconds[False])
                rows.append({"slower": factor, "tokens": length, "ratio": round(ratio, 3)})
                progress(
                    f"vault {factor}x slower, {length} tokens: {median(seconds[True]) * 1000:.1f} ms, computed "
                    f"{median(seconds[False]) * 1000:.1f} ms: {ratio:.3f}; restored {restored // repeats} on average"
                )
        ours.close()
    worst = max(row["ratio"] for row in rows)
    finish(
        "never_worse",
        worst,
        "times the first token of computing, at worst",
        floor=FLOOR,
        ok=worst <= FLOOR,
        peer="the same engine, the vault not asked",
        rows=rows,
        repeats=REPEATS,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
