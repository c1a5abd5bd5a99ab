"""Seconds to the first token of one 1,000-token prompt, against one forward pass of transformers.

    python -m benchmarks.prefill [--quick] [--model gpt2|qwen] [--threads N]

The peer computes logits of the last token only, and fills its cache. Prompts are random and new in every round, the
two run in turn. Kept also by the share of this machine's bound, that of its products. In fp32 the tokens must agree.
"""

from __future__ import annotations

from random import Random
from statistics import median

from benchmarks.engine._engine import BLOCK, Ours, fresh_prompts
from benchmarks.engine._engine_models import NATIVE, Name, model_folder
from benchmarks.engine._exact import Referee
from benchmarks.engine._plain import VERSION, Plain
from benchmarks.engine._versus import Part, Trials, bound_s, compare, conclude, first_token, label, options_of
from benchmarks.harness.yardstick_machine import Machine, measure_machine

LENGTH = 1_000
FLOORS: dict[Name, float] = {"gpt2": 2.0, "qwen2-0.5b": 1.2}


def measure(model: Name, rounds: int, machine: Machine) -> Part:
    folder, dtype, threads = model_folder(model), NATIVE[model], machine.threads
    ours = Ours(folder, dtype, threads=threads, sequences=2, context=LENGTH + 1)
    plain = Plain(folder, dtype)
    prompts = fresh_prompts(Random(5), rounds + 1, LENGTH, ours.vocab_size)
    runs = [(ours.generate([prompt], 1), plain.prefill(prompt)) for prompt in prompts]
    assert all(our.cached[0] < BLOCK for our, _ in runs)  # the beginning of a block may match by chance
    wrong = Referee(folder, dtype).wrong(
        prompts, [our.tokens[0] for our, _ in runs], [their.tokens[0] for _, their in runs]
    )
    timed = runs[1:]  # the first is the warm-up
    seconds = (our.ttft_s[0] for our, _ in timed), (their.ttft_s[0] for _, their in timed)
    bound = median(bound_s(our, ours.weights, machine, first_token) for our, _ in timed)
    return compare(label(model), FLOORS[model], *seconds, wrong, bound_s=bound)


def main() -> None:
    options = options_of(__doc__)
    machine, trials = measure_machine(options.threads), Trials()
    for model in options.models:
        with trials.of(label(model)):
            trials.parts.append(measure(model, 3 if options.quick else 9, machine))
    conclude(
        "prefill",
        "times as fast",
        trials,
        floor=min(FLOORS[model] for model in options.models),
        peer=f"{VERSION} forward",
        prompt_tokens=LENGTH,
        machine=machine.report(),
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
