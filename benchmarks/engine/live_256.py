"""Tokens per second with 256 live sequences, against the same engine with 16.

    python -m benchmarks.live_256 [--quick] [--threads N]

Random weights in the shape of GPT-2, fp32; 32 tokens in, 32 out, prompts new in every round, the two loads in turn. The
time is from submission to the last token. All 256 must have run in one step.
"""

from __future__ import annotations

from random import Random

from benchmarks.engine._engine import CORES, NO_HURRY, Ours, fresh_prompts
from benchmarks.engine._engine_models import model_folder
from benchmarks.harness.report import finish, parser, progress, spread
from kvfleet.worker.blocks.pool_integrity import check_integrity

FEW, MANY, PROMPT, OUTPUT, FLOOR = 16, 256, 32, 32, 1.0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    options = arguments.parse_args()
    flags = {"threads": options.threads, "sequences": MANY, "context": PROMPT + OUTPUT}
    ours = Ours(model_folder("gpt2"), "float32", itl_target_s=NO_HURRY, **flags)  # all are live before the first ends
    chance = Random(7)
    rates: dict[int, list[float]] = {FEW: [], MANY: []}
    most = 0
    ours.generate(fresh_prompts(chance, FEW, PROMPT, ours.vocab_size), 4)
    for turn in range(2 if options.quick else 6):
        for load, seen in rates.items():
            run = ours.generate(fresh_prompts(chance, load, PROMPT, ours.vocab_size), OUTPUT)
            seen.append(run.tokens_per_s)
            most = max(most, *(step.sequences for step in run.steps))
        check_integrity(ours.engine.pool, [])
        progress(f"round {turn + 1}: {rates[FEW][-1]:.0f} tokens/s at {FEW}, {rates[MANY][-1]:.0f} at {MANY}")
    few, many = spread(rates[FEW]), spread(rates[MANY])
    ratio = many["median"] / few["median"]
    finish(
        "live_256",
        round(ratio, 3),
        "times the tokens per second",
        floor=FLOOR,
        ok=ratio >= FLOOR and most == MANY,
        peer=f"the same engine, {FEW} sequences",
        tokens_per_s=many,
        peer_tokens_per_s=few,
        most_in_a_step=most,
        prompt_tokens=PROMPT,
        output_tokens=OUTPUT,
        itl_target_s=NO_HURRY,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
