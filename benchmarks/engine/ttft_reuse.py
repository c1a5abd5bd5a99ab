"""Time to first token of a 2,000-token turn with all but 64 tokens cached, against the same turn cold.

    python -m benchmarks.ttft_reuse [--quick] [--dtype bfloat16] [--threads N]

One engine in this process, no network: random weights in the shape of Qwen2-0.5B. Cold and cached turns alternate, each
with tokens of its own, so that neither profits from the other; the value is the ratio of the medians. The tokens that
the model was run on are counted: a cached turn may feed at most 64 and one block.
"""

from __future__ import annotations

from random import Random
from statistics import median

from benchmarks.engine._engine import BLOCK, CORES, STEP_TOKENS, OurRun, Ours, fresh_prompts
from benchmarks.engine._engine_models import model_folder
from benchmarks.harness.report import finish, parser, progress, spread

PROMPT, NEW = 2_000, 64
FLOOR = 15.0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments.add_argument("--threads", type=int, default=CORES, help="of torch; default: all cores")
    arguments.add_argument("--token-budget", type=int, default=STEP_TOKENS)
    options = arguments.parse_args()
    ours = Ours(
        model_folder("qwen2-0.5b", options.dtype),
        options.dtype,
        threads=options.threads,
        sequences=2,
        context=PROMPT + 1,
        token_budget=options.token_budget,
    )
    chance = Random(0)

    def fresh(length: int) -> list[int]:
        return fresh_prompts(chance, 1, length, ours.vocab_size)[0]

    cold: list[OurRun] = []
    cached: list[OurRun] = []
    for length in (PROMPT, NEW):
        ours.generate([fresh(length)], 1)  # the first ones warm up
    for turn in range(2 if options.quick else 5):
        history = fresh(PROMPT)
        cold.append(ours.generate([history], 1))
        again = [ours.generate([history[:-NEW] + fresh(NEW)], 1) for _ in range(3)]
        cached += again
        shown = cold[-1].ttft_s[0], median(run.ttft_s[0] for run in again)
        progress(f"turn {turn + 1}: cold {shown[0]:.3f} s, cached {shown[1]:.4f} s")
    for run in (*cold, *cached):
        assert run.fed_tokens + run.cached[0] == PROMPT
    assert all(run.cached[0] < BLOCK for run in cold)  # the beginning of a block may match by chance
    most_fed = max(run.fed_tokens for run in cached)
    cold_s, cached_s = (spread(run.ttft_s[0] for run in runs) for runs in (cold, cached))
    ratio = cold_s["median"] / cached_s["median"]
    finish(
        "ttft_reuse",
        round(ratio, 2),
        "times faster than cold",
        floor=FLOOR,
        ok=ratio >= FLOOR and most_fed <= NEW + BLOCK,
        peer="the same engine, nothing cached",
        cold_s=cold_s,
        cached_s=cached_s,
        fed_tokens=most_fed,
        prompt_tokens=PROMPT,
        new_tokens=NEW,
        dtype=options.dtype,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
