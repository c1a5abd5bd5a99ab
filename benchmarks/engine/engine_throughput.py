"""Generated tokens per second of 16 concurrent requests, against transformers' continuous batching.

    python -m benchmarks.engine_throughput [--quick] [--model gpt2|qwen] [--threads N] [--itl-target-s S]

128 tokens in, 64 out, all submitted at once; fresh random prompts in every round, the same for both engines. The two
run in turn, the peer stopped while ours runs; each part's ratio is that of the medians, and is kept also by the share
of this machine's bound that ours reaches. In fp32 the tokens must agree.
"""

from __future__ import annotations

from random import Random

from benchmarks.engine._engine import Ours, fresh_prompts
from benchmarks.engine._engine_models import NATIVE, Name, model_folder
from benchmarks.engine._exact import Referee
from benchmarks.engine._versus import Part, Rival, Trials, conclude, label, options_of, race
from benchmarks.harness.yardstick_machine import Machine, measure_machine

STREAMS, PROMPT, OUTPUT = 16, 128, 64
FLOORS: dict[Name, float] = {"gpt2": 3.0, "qwen2-0.5b": 2.0}


def measure(model: Name, rounds: int, machine: Machine, itl_target_s: float) -> tuple[Part, str]:
    folder, dtype, threads = model_folder(model), NATIVE[model], machine.threads
    ours = Ours(folder, dtype, threads=threads, sequences=STREAMS, context=PROMPT + OUTPUT, itl_target_s=itl_target_s)
    chance = Random(1)
    flags = {"threads": threads, "sequences": STREAMS, "context": PROMPT + OUTPUT}
    with Rival("transformers", folder, dtype, **flags) as rival:
        for engine in (ours, rival):
            engine.generate(fresh_prompts(chance, STREAMS, PROMPT, ours.vocab_size), 4)
        works = [fresh_prompts(chance, STREAMS, PROMPT, ours.vocab_size) for _ in range(rounds)]
        referee = Referee(folder, dtype)
        part = race(label(model), FLOORS[model], ours, rival, works, OUTPUT, referee, machine=machine)
    return part, rival.engine


def main() -> None:
    options = options_of(__doc__, batch=True)
    machine, trials, version = measure_machine(options.threads), Trials(), "transformers"
    for model in options.models:
        with trials.of(label(model)):
            part, version = measure(model, 1 if options.quick else 4, machine, options.itl_target_s)
            trials.parts.append(part)
    conclude(
        "engine_throughput",
        "times the tokens per second",
        trials,
        floor=min(FLOORS[model] for model in options.models),
        peer=f"{version} continuous batching",
        machine=machine.report(),
        streams=STREAMS,
        prompt_tokens=PROMPT,
        output_tokens=OUTPUT,
        threads=options.threads,
        itl_target_s=options.itl_target_s,
    )


if __name__ == "__main__":
    main()
