"""The draws of a step, against the step.

    python -m benchmarks.gpu_sampler [--quick] [--dry]

256 streams of a Qwen2.5-7B shape (random weights, bf16, a vocabulary of 152,064): half of them at a temperature alone,
the others with `top_p`, `top_k`, `min_p` and penalties. The value is the time of the draws, from logits to tokens on
the host, as a share of the whole step's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu._gpu import BLOCK, begin, end, load
from benchmarks.harness.report import progress
from kvproto.messages import Sampling
from kvsampling.draw import Draw

NAME, UNIT, CEILING, PEER = "gpu_sampler", "of the step", 0.15, "the step"
STREAMS, CONTEXT = 256, 200
WAYS: list[dict[str, Any]] = [
    {}, {"top_p": 0.9}, {}, {"top_k": 50, "top_p": 0.95}, {}, {"min_p": 0.05}, {}, {"presence_penalty": 0.5},
]  # fmt: skip


def main() -> None:
    asked = begin(NAME, UNIT, floor=CEILING, peer=PEER, doc=__doc__)
    from kvsampling import gpu  # once it is known whether kernels are interpreted

    streams, context = (4, 20) if asked.dry else (STREAMS, CONTEXT)
    rounds = 3 if asked.quick or asked.dry else 20
    bench = load(streams * (-(-(context + 1) // BLOCK)), dry=asked.dry)
    draws = [
        Draw(Sampling(1, seed=at, temperature=0.8, **WAYS[at % len(WAYS)]), 0, at, output_ids=range(100))
        for at in range(streams)
    ]
    step_s = bench.seconds(partial(bench.runner.run, bench.slices(context, 1, draws)), rounds)
    chance = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(streams, bench.runner.vocab_size, generator=chance)
    logits = logits.to(bench.device, torch.float32 if asked.dry else torch.bfloat16)
    draws_s = bench.seconds(lambda: gpu.begin(logits, draws).result(), rounds)
    progress(f"{draws_s * 1e3:.2f} ms of a step of {step_s * 1e3:.2f} ms")
    value = draws_s / step_s
    end(
        asked, NAME, value, UNIT, floor=CEILING, peer=PEER, ok=value <= CEILING,
        draws_ms=round(draws_s * 1e3, 3), step_ms=round(step_s * 1e3, 3),
    )  # fmt: skip


if __name__ == "__main__":
    main()
