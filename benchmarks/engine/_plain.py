"""transformers in this process, as anyone would use it: the peer where single calls of it are timed.

An untouched copy of the model, SDPA, `inference_mode`; our engine changes the copy that it loads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.engine._engine import Measured
from benchmarks.harness.peers import PeerFailed

VERSION = f"transformers {transformers.__version__}"


@contextmanager
def _its_own_fault() -> Iterator[None]:
    """What it raises ends the comparison, not the benchmark."""
    try:
        yield
    except Exception as error:
        raise PeerFailed(f"{VERSION}: {type(error).__name__}: {error}") from error


class Plain:
    """One model. Uses as many threads as torch has. All of it raises PeerFailed."""

    @_its_own_fault()
    def __init__(self, folder: Path, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    @_its_own_fault()
    def prefill(self, prompt: list[int]) -> Measured:
        """One forward pass up to the first token."""
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        with torch.inference_mode():
            token = int(self.model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        seconds = time.perf_counter() - began
        return Measured(seconds, [[token]], [seconds])

    @_its_own_fault()
    def generate(self, prompts: list[list[int]], max_tokens: int, cache: Any = None) -> tuple[Measured, list[float]]:
        """`generate` on prompts of one length, going on from `cache` if given; also the seconds of each step."""
        ids = torch.tensor(prompts)
        ended: list[float] = []

        def each_step(_: Tensor, __: Any, **___: Any) -> Tensor:
            ended.append(time.perf_counter())
            return torch.zeros(len(prompts), dtype=torch.bool)

        began = time.perf_counter()
        with torch.inference_mode():
            made = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=DynamicCache(config=self.model.config) if cache is None else cache,
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[each_step],
            )
        seconds = time.perf_counter() - began
        steps = [after - before for before, after in zip([began, *ended[:-1]], ended, strict=True)]
        tokens = made[:, ids.shape[1] :].tolist()
        return Measured(seconds, tokens, [ended[0] - began] * len(prompts)), steps

    @_its_own_fault()
    def filled_cache(self, prompts: list[list[int]]) -> Any:
        """A DynamicCache with all but the last token of prompts of one length."""
        cache = DynamicCache(config=self.model.config)
        with torch.inference_mode():
            self.model(torch.tensor(prompts)[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache
