"""How long running streams wait for their next token while long prompts arrive.

    python -m benchmarks.itl_under_prefill [--quick] [--threads N]

8 streams decode on the Qwen2-0.5B shape in bf16. Calm stretches of decoding alternate with stretches in which one
4,000-token prompt after the other is prefilled beside them. The value is the p99 of the time between two tokens of a
stream while prompts arrive, over the p50 of calm: it must not exceed the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from statistics import median, quantiles

from benchmarks.engine._engine import CORES, Ours, fresh_prompts
from benchmarks.engine._engine_models import model_folder
from benchmarks.harness.report import finish, parser, progress
from kvproto.messages import ChoiceFinished, Tokens

STREAMS, PROMPT, ARRIVING = 8, 128, 4_000
OUTPUT = 3_900  # more than are decoded here
CALM_STEPS, FLOOR = 60, 4.0


class Streams:
    """Streams that decode without end, and the gaps between the tokens of each."""

    def __init__(self, ours: Ours, prompts: list[list[int]]) -> None:
        self._ours = ours
        self._last = {ours.add(prompt, OUTPUT): 0.0 for prompt in prompts}
        while not all(self._last.values()):
            self._step()

    def gaps(self, ended: Callable[[set[str]], bool]) -> list[float]:
        """Of all streams, until `ended`, given the requests that finished in the last step, says so."""
        found: list[float] = []
        finished: set[str] = set()
        while not ended(finished):
            finished = self._step(found)
        return found

    def _step(self, found: list[float] | None = None) -> set[str]:
        outputs = self._ours.step().outputs
        now = time.perf_counter()
        for output in outputs:
            if isinstance(output, Tokens) and output.request in self._last:
                if found is not None:
                    found.append(now - self._last[output.request])
                self._last[output.request] = now
        return {output.request for output in outputs if isinstance(output, ChoiceFinished)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    options = arguments.parse_args()
    ours = Ours(model_folder("qwen2-0.5b"), "bfloat16", threads=options.threads, sequences=STREAMS + 1)
    chance = Random(8)

    def fresh(how_many: int, length: int) -> list[list[int]]:
        return fresh_prompts(chance, how_many, length, ours.vocab_size)

    ours.generate(fresh(1, ARRIVING // 4), 2)
    streams = Streams(ours, fresh(STREAMS, PROMPT))
    calm: list[float] = []
    busy: list[float] = []
    prefill_s: list[float] = []
    for turn in range(2 if options.quick else 5):
        left = iter(range(CALM_STEPS))
        calm += streams.gaps(lambda _, left=left: next(left, None) is None)  # type: ignore[misc]
        began = time.perf_counter()
        arrived = ours.add(fresh(1, ARRIVING)[0], 1)
        busy += streams.gaps(lambda finished, arrived=arrived: arrived in finished)  # type: ignore[misc]
        prefill_s.append(time.perf_counter() - began)
        progress(f"round {turn + 1}: p50 {median(calm):.4f} s calm; {ARRIVING} tokens came in {prefill_s[-1]:.2f} s")
    calm_cuts, busy_cuts = quantiles(calm, n=100), quantiles(busy, n=100)
    ratio = busy_cuts[98] / calm_cuts[49]
    finish(
        "itl_under_prefill",
        round(ratio, 2),
        "times the calm p50, at most",
        floor=FLOOR,
        ok=ratio <= FLOOR,
        peer="the same engine without arrivals",
        itl_p99_s=round(busy_cuts[98], 4),
        itl_p50_s=round(busy_cuts[49], 4),
        itl_max_s=round(max(busy), 4),
        calm_p50_s=round(calm_cuts[49], 4),
        calm_p99_s=round(calm_cuts[98], 4),
        prefill_tokens_per_s=round(ARRIVING / median(prefill_s), 1),
        gaps=[len(calm), len(busy)],
        streams=STREAMS,
        arriving_tokens=ARRIVING,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
