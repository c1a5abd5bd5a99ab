"""Tokens per second of a single stream at a context of 128, against transformers' `generate`.

    python -m benchmarks.single_stream [--quick] [--model gpt2|qwen] [--threads N]

128 tokens in, 64 out; what counts is the decoding after the first token. Prompts are random and new in every round,
the two run in turn. Kept also by the share of this machine's bound: a step reads all weights. In fp32 the tokens must
agree.
"""

from __future__ import annotations

from random import Random
from statistics import median

from benchmarks.engine._engine import Ours, fresh_prompts
from benchmarks.engine._engine_models import NATIVE, Name, model_folder
from benchmarks.engine._exact import Referee
from benchmarks.engine._plain import VERSION, Plain
from benchmarks.engine._versus import Part, Trials, bound_s, compare, conclude, label, options_of, per_token
from benchmarks.harness.yardstick_machine import Machine, measure_machine

PROMPT, OUTPUT, FLOOR = 128, 64, 2.0


def measure(model: Name, rounds: int, machine: Machine) -> Part:
    folder, dtype, threads = model_folder(model), NATIVE[model], machine.threads
    ours = Ours(folder, dtype, threads=threads, sequences=2, context=PROMPT + OUTPUT)
    plain = Plain(folder, dtype)
    chance = Random(6)
    for engine in (ours, plain):
        engine.generate(fresh_prompts(chance, 1, PROMPT, ours.vocab_size), 4)
    prompts = fresh_prompts(chance, rounds, PROMPT, ours.vocab_size)
    runs = [(ours.generate([prompt], OUTPUT), plain.generate([prompt], OUTPUT)[0]) for prompt in prompts]
    wrong = Referee(folder, dtype).wrong(
        prompts, [our.tokens[0] for our, _ in runs], [their.tokens[0] for _, their in runs]
    )
    return compare(
        label(model),
        FLOOR,
        (per_token(our) for our, _ in runs),
        (per_token(their) for _, their in runs),
        wrong,
        bound_s=median(bound_s(our, ours.weights, machine, per_token) for our, _ in runs),
        tokens_per_s=round(median(our.decode_per_s for our, _ in runs), 1),
        peer_tokens_per_s=round(median(their.decode_per_s for _, their in runs), 1),
        with_prompt=round(median(their.seconds for _, their in runs) / median(our.seconds for our, _ in runs), 3),
    )


def main() -> None:
    options = options_of(__doc__)
    machine, trials = measure_machine(options.threads), Trials()
    for model in options.models:
        with trials.of(label(model)):
            trials.parts.append(measure(model, 2 if options.quick else 7, machine))
    conclude(
        "single_stream",
        "times as fast",
        trials,
        floor=FLOOR,
        peer=f"{VERSION} generate",
        prompt_tokens=PROMPT,
        output_tokens=OUTPUT,
        machine=machine.report(),
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
