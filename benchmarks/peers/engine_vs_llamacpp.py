"""Our engine against llama.cpp, on the same weights: a single stream, and 16 concurrent requests.

    python -m benchmarks.engine_vs_llamacpp [--quick] [--model gpt2|qwen] [--threads N] [--itl-target-s S]

| part | work | counted |
| --- | --- | --- |
| single | one prompt of 128 tokens, 64 out | seconds per token, after the first |
| 16 | 16 such prompts at once | seconds in all |

GPT-2 in fp32 and bf16, the Qwen2-0.5B shape in bf16. Prompts are random and new in every round; llama.cpp is stopped
while ours runs.
"""

from __future__ import annotations

from random import Random

from benchmarks.engine._engine import Ours, fresh_prompts
from benchmarks.engine._engine_models import Dtype, Name, model_folder
from benchmarks.engine._exact import Referee
from benchmarks.engine._versus import Part, Rival, Trials, conclude, label, options_of, per_token, race
from benchmarks.harness.peers import interpreter
from benchmarks.harness.yardstick_machine import Machine, measure_machine

NAME, UNIT = "engine_vs_llamacpp", "times as fast"
FLOOR_SINGLE, FLOOR_MANY = 0.9, 1.2
STREAMS, PROMPT, OUTPUT = 16, 128, 64
DTYPES: dict[Name, list[Dtype]] = {"gpt2": ["float32", "bfloat16"], "qwen2-0.5b": ["bfloat16"]}


def measure(model: Name, dtype: Dtype, machine: Machine, itl_target_s: float, *, quick: bool) -> tuple[list[Part], str]:
    folder, threads = model_folder(model, dtype), machine.threads
    interpreter("llamacpp")  # nothing is loaded where it is absent
    referee = Referee(folder, dtype)
    chance = Random(3)
    ours = Ours(folder, dtype, threads=threads, sequences=STREAMS, context=PROMPT + OUTPUT, itl_target_s=itl_target_s)
    flags = {"threads": threads, "sequences": STREAMS, "context": PROMPT + OUTPUT}
    with Rival("llamacpp", folder, dtype, **flags) as rival:

        def works(rounds: int, streams: int) -> list[list[list[int]]]:
            return [fresh_prompts(chance, streams, PROMPT, ours.vocab_size) for _ in range(rounds)]

        for engine in (ours, rival):
            engine.generate(works(1, STREAMS)[0], 4)
        name = label(model, dtype)
        single, many = works(3 if quick else 7, 1), works(1 if quick else 4, STREAMS)
        parts = [
            race(f"{name} single", FLOOR_SINGLE, ours, rival, single, OUTPUT, referee, per_token, machine=machine),
            race(f"{name} {STREAMS}", FLOOR_MANY, ours, rival, many, OUTPUT, referee, machine=machine),
        ]
        return parts, rival.engine


def main() -> None:
    options = options_of(__doc__, batch=True)
    machine, trials, version = measure_machine(options.threads), Trials(), "llama.cpp"
    for model in options.models:
        for dtype in DTYPES[model]:
            with trials.of(label(model, dtype)):
                measured, version = measure(model, dtype, machine, options.itl_target_s, quick=options.quick)
                trials.parts += measured
    conclude(
        NAME,
        UNIT,
        trials,
        floor=FLOOR_SINGLE,
        peer=version,
        machine=machine.report(),
        prompt_tokens=PROMPT,
        output_tokens=OUTPUT,
        threads=options.threads,
        itl_target_s=options.itl_target_s,
    )


if __name__ == "__main__":
    main()
