"""A decode step of 16 sequences at 1,000 tokens, against that of transformers' `generate` with a DynamicCache.

    python -m benchmarks.decode_step [--quick] [--model gpt2|qwen] [--threads N]

Both first prefill the same 16 prompts, untimed; then each round decodes the same tokens from there, ours and the
peer's in turn, and every step but the first counts. The last token of a round is the sequence's 1,000th. `generate`
gets a batch of equal lengths: nothing of it is padding. Kept also by the share of this machine's bound: a step reads
all weights and all of K and V. In fp32 the tokens must agree.
"""

from __future__ import annotations

from random import Random
from statistics import median

from benchmarks.engine._engine import BLOCK, Ours, fresh_prompts
from benchmarks.engine._engine_models import NATIVE, Name, model_folder
from benchmarks.engine._exact import Referee
from benchmarks.engine._plain import VERSION, Plain
from benchmarks.engine._versus import Part, Trials, compare, conclude, label, options_of
from benchmarks.harness.report import progress
from benchmarks.harness.yardstick_machine import Machine, measure_machine

STREAMS, LENGTH = 16, 1_000
FLOORS: dict[Name, float] = {"gpt2": 5.0, "qwen2-0.5b": 3.0}


def measure(model: Name, machine: Machine, *, quick: bool) -> Part:
    folder, dtype, threads = model_folder(model), NATIVE[model], machine.threads
    rounds, tokens = (1, 6) if quick else (5, 12)
    ours = Ours(folder, dtype, threads=threads, sequences=STREAMS, context=LENGTH)
    plain = Plain(folder, dtype)
    prompts = fresh_prompts(Random(4), STREAMS, LENGTH - tokens, ours.vocab_size)
    progress(f"{label(model)}: prefilling, twice")
    ours.generate(prompts, 1)
    cache = plain.filled_cache(prompts)
    our_steps: list[float] = []
    their_steps: list[float] = []
    for turn in range(rounds):
        run = ours.generate(prompts, tokens)
        steps = [step for step in run.steps if step.sequences == STREAMS and not step.prefill_tokens]
        assert len(steps) == tokens - 1
        their, all_steps = plain.generate(prompts, tokens, cache)
        cache.crop(len(prompts[0]) - 1 - cache.get_seq_length())  # a negative number removes so many
        our_steps += [step.seconds for step in steps]
        their_steps += all_steps[1:]
        progress(f"round {turn + 1}: ours {median(our_steps):.4f} s, the peer's {median(all_steps[1:]):.4f} s")
    wrong = Referee(folder, dtype).wrong(prompts, run.tokens, their.tokens)
    cached = STREAMS * (LENGTH - tokens // 2) * ours.runner.bytes_per_block // BLOCK
    bound = ours.weights.bound_s(machine, steps[:1], cached)
    return compare(label(model), FLOORS[model], our_steps, their_steps, wrong, bound_s=bound)


def main() -> None:
    options = options_of(__doc__)
    machine, trials = measure_machine(options.threads), Trials()
    for model in options.models:
        with trials.of(label(model)):
            trials.parts.append(measure(model, machine, quick=options.quick))
    conclude(
        "decode_step",
        "times as fast",
        trials,
        floor=min(FLOORS[model] for model in options.models),
        peer=f"{VERSION} generate, DynamicCache",
        sequences=STREAMS,
        length=LENGTH,
        machine=machine.report(),
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
