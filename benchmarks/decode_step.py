"""A decode step of 16 sequences at 1,000 tokens, against that of transformers' `generate` with a DynamicCache.

    python -m benchmarks.decode_step [--quick] [--model gpt2|qwen] [--threads N]

Both first prefill the same 16 prompts, untimed; then each round decodes the same tokens from there, ours and the peer's
in turn, and every step but the first counts. The last token of a round is the sequence's 1,000th. `generate` gets a
batch of equal lengths: nothing of it is padding. In fp32 the tokens must agree.
"""

from __future__ import annotations

from random import Random
from statistics import median

from benchmarks._engine import Ours, fresh_prompts
from benchmarks._engine_models import NATIVE, Name, model_folder
from benchmarks._exact import Referee
from benchmarks._plain import VERSION, Plain
from benchmarks._report import progress
from benchmarks._versus import Part, compare, conclude, label, options_of

STREAMS, LENGTH = 16, 1_000
FLOORS: dict[Name, float] = {"gpt2": 5.0, "qwen2-0.5b": 3.0}


def measure(model: Name, threads: int, *, quick: bool) -> Part:
    folder, dtype = model_folder(model), NATIVE[model]
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
        steps = [step.seconds for step in run.steps if step.sequences == STREAMS and not step.prefill_tokens]
        assert len(steps) == tokens - 1
        their, all_steps = plain.generate(prompts, tokens, cache)
        cache.crop(len(prompts[0]) - 1 - cache.get_seq_length())  # a negative number removes so many
        our_steps += steps
        their_steps += all_steps[1:]
        progress(f"round {turn + 1}: ours {median(steps):.4f} s, the peer's {median(all_steps[1:]):.4f} s")
    wrong = Referee(folder, dtype).wrong(prompts, run.tokens, their.tokens)
    return compare(label(model), FLOORS[model], our_steps, their_steps, wrong)


def main() -> None:
    options = options_of(__doc__)
    parts = [measure(model, options.threads, quick=options.quick) for model in options.models]
    conclude(
        "decode_step",
        "times as fast",
        parts,
        peer=f"{VERSION} generate, DynamicCache",
        sequences=STREAMS,
        length=LENGTH,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
