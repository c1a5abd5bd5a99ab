"""Whether greedy tokens are right: judged by an untouched transformers model, where two engines differ.

In fp32 a sum may come out differently in its last bits, so where the reference's own first two logits are closer than
`MARGIN`, either is right. Behind the first difference two engines run on different texts and are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

MARGIN = 1e-4


@dataclass(frozen=True, slots=True)
class Wrong:
    """A token of ours that the reference puts `margin` behind its first."""

    prompt: int
    at: int
    token: int
    expected: int
    margin: float


class Referee:
    """Loads the model when there is something to judge; the last judged difference is behind everything measured."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, dtype
        self._model: Any = None

    def wrong(self, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]) -> list[Wrong]:
        """Our tokens that are wrong, at most one of each prompt. Always none but in fp32."""
        found = []
        if self._dtype == "float32":
            for index, (prompt, our, their) in enumerate(zip(prompts, ours, theirs, strict=True)):
                at = next((at for at, pair in enumerate(zip(our, their, strict=True)) if pair[0] != pair[1]), None)
                if at is not None:
                    expected, margin = self._judge(prompt + our[:at], our[at])
                    if margin >= MARGIN:
                        found.append(Wrong(index, at, our[at], expected, round(margin, 6)))
        return found

    def _judge(self, ids: list[int], token: int) -> tuple[int, float]:
        """The token that the reference puts first, and how far ahead of `token` it is."""
        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        return int(logits.argmax()), float(logits.max() - logits[token])
