"""Tokens per second of 16 streams that follow a JSON schema, against the same streams without.

    python -m benchmarks.constrained [--quick] [--model gpt2|qwen] [--threads N]

64 tokens in, 48 out, sampled at temperature 0.8 with top-p 0.9; the schema, a list of records, lets no output end
before. One engine serves both in turn; compiling is not counted. The model's words are made by merging random pairs of
shorter ones, as many as the model has: what a mask costs depends on their number and on what they begin with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from random import Random
from statistics import median

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.engine._engine import Ours, fresh_prompts
from benchmarks.engine._engine_models import NATIVE, Name, model_folder
from benchmarks.engine._versus import label, options_of
from benchmarks.harness.report import finish, progress, spread
from kvfleet.worker.text.detokenizer import Detokenizer
from kvproto.messages import Grammar, GrammarForm, Sampling

NAME, UNIT, FLOOR = "constrained", "of the tokens/s without a schema", 0.9
STREAMS, PROMPT, OUTPUT = 16, 64, 48
LONGEST = 12  # bytes of a word
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2999},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}},
        "parent": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"name": {"type": "string"}}}]},
    },
    "required": ["name", "kind", "year", "tags", "parent"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": OUTPUT}


def tokenizer_of(vocab: int) -> Tokenizer:
    """Byte-level BPE of `vocab` words."""
    chance = Random(1)
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    seen, merges = dict(zip(words, count())), list[tuple[str, str]]()
    letters = [*"etaoinshrdlucmfwypvbgkjqxz", *'"{}[]:,0123456789', "Ġ"]
    while len(words) < vocab:
        left, right = (chance.choice(letters if chance.random() < 0.4 else words) for _ in range(2))
        if len(word := left + right) <= LONGEST and word not in seen:
            seen[word] = len(words)
            words.append(word)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=seen, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def measure(model: Name, rounds: int, threads: int) -> float:
    folder, dtype = model_folder(model), NATIVE[model]
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    text = Detokenizer(tokenizer_of(vocab))
    ours = Ours(folder, dtype, threads=threads, sequences=STREAMS, context=PROMPT + OUTPUT, detokenizer=text)
    free = Sampling(1, temperature=0.8, top_p=0.9, ignore_eos=True)
    bound = replace(free, grammar=Grammar(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA)))
    chance, rates = Random(1), {"bound": list[float](), "free": list[float]()}
    for number in range(-1, rounds):
        for kind, sampling in (("free", free), ("bound", bound))[:: 1 if number % 2 else -1]:
            ours.sampling = sampling
            run = ours.generate(fresh_prompts(chance, STREAMS, PROMPT, vocab), OUTPUT)
            if number >= 0:  # the first warms up
                rates[kind].append(run.tokens_per_s)
    ratio = median(rates["bound"]) / median(rates["free"])
    told = ", ".join(f"{kind} {median(some):.1f} ({spread(some)})" for kind, some in rates.items())
    progress(f"{label(model)}: {ratio:.3f}; tokens/s: {told}")
    return ratio


def main() -> None:
    options = options_of(__doc__)
    ratios = {model: measure(model, 3 if options.quick else 9, options.threads) for model in options.models}
    value = min(ratios.values())
    parts = {label(model): round(ratio, 4) for model, ratio in ratios.items()}
    finish(NAME, round(value, 4), UNIT, floor=FLOOR, ok=value >= FLOOR, peer="the same engine", parts=parts)


if __name__ == "__main__":
    main()
