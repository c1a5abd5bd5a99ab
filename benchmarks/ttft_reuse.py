"""Time to first token of a 2,000-token turn with all but 64 tokens cached, against the same turn cold.

    python -m benchmarks.ttft_reuse [--quick] [--dtype bfloat16] [--threads N]

One engine in this process, no network: random weights in the shape of Qwen2-0.5B. Cold and cached turns alternate, each
with tokens of its own, so that neither profits from the other; the value is the ratio of the medians. The tokens that
the model was run on are counted: a cached turn may feed at most 64 and one block.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

import torch
from transformers import Qwen2Config

from benchmarks._report import finish, parser, progress, spread
from kvproto.messages import Sampling
from services.worker.block_pool import BlockPool
from services.worker.detokenizer import IdDetokenizer
from services.worker.engine import Engine
from services.worker.model.attention.reference import ReferenceBackend
from services.worker.model.loader import load_model
from services.worker.model.runner import TorchRunner
from services.worker.outputs import SequenceStarted, SequenceTokens
from services.worker.scheduler import Scheduler
from services.worker.sequence import SequenceSpec

PROMPT, NEW, BLOCK = 2_000, 64, 16
FLOOR = 10.0
SHAPE = Qwen2Config(
    hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
    vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=4096,
)  # fmt: skip


class Stopwatch:
    """Runs one request at a time on one engine."""

    def __init__(self, dtype: str, token_budget: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            SHAPE.save_pretrained(folder)
            loaded = load_model(Path(folder), load_format="dummy", dtype=dtype, device="auto")  # type: ignore[arg-type]
        blocks = 4 * -(-PROMPT // BLOCK)
        pool = BlockPool(blocks, BLOCK)
        self.device = str(loaded.device)
        self.engine = Engine(
            TorchRunner(loaded, ReferenceBackend(), blocks, BLOCK),
            pool,
            Scheduler(pool, token_budget=token_budget),
            IdDetokenizer(),
        )

    def run(self, name: str, prompt: list[int]) -> tuple[float, int, int]:
        """Seconds to the first token, tokens fed until then, tokens found cached."""
        began, fed, cached, seconds = time.perf_counter(), 0, 0, 0.0
        sampling = Sampling(1, temperature=0.0, ignore_eos=True)
        self.engine.add(SequenceSpec(name, 0, tuple(prompt), sampling, b"benchmark root16"))
        while self.engine.has_work:
            result = self.engine.step()
            fed += result.fed_tokens
            for output in result.outputs:
                if isinstance(output, SequenceStarted):
                    cached = output.cached_tokens
                elif isinstance(output, SequenceTokens):
                    seconds = time.perf_counter() - began
        return seconds, fed, cached


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments.add_argument("--threads", type=int, default=0, help="of torch; default: all cores")
    arguments.add_argument("--token-budget", type=int, default=512)
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    progress("making random weights")
    watch = Stopwatch(options.dtype, options.token_budget)
    chance = Random(0)
    cold, cached, most_fed = [], [], 0
    watch.run("warm-up", [chance.randrange(SHAPE.vocab_size) for _ in range(NEW)])
    for turn in range(2 if options.quick else 5):
        history = [chance.randrange(SHAPE.vocab_size) for _ in range(PROMPT)]
        seconds, fed, hit = watch.run(f"cold-{turn}", history)
        assert (fed, hit) == (PROMPT, 0)
        cold.append(seconds)
        for again in range(3):
            new = [chance.randrange(SHAPE.vocab_size) for _ in range(NEW)]
            seconds, fed, hit = watch.run(f"cached-{turn}-{again}", history[:-NEW] + new)
            cached.append(seconds)
            most_fed = max(most_fed, fed)
            assert fed + hit == PROMPT
        progress(f"turn {turn + 1}: cold {cold[-1]:.3f} s, cached {median(cached[-3:]):.4f} s")
    ratio = median(cold) / median(cached)
    finish(
        "ttft_reuse",
        round(ratio, 2),
        "times faster than cold",
        floor=FLOOR,
        ok=ratio >= FLOOR and most_fed <= NEW + BLOCK,
        peer="the same engine, nothing cached",
        cold_s=spread(cold),
        cached_s=spread(cached),
        fed_tokens=most_fed,
        prompt_tokens=PROMPT,
        new_tokens=NEW,
        dtype=options.dtype,
        device=watch.device,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
