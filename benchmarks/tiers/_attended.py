"""How much attention later tokens pay to each block of a sequence, by the demo model, and policies that go by it.

Of a turn those queries count that a worker could sample: of the prompt's last token and of all generated ones, the mean
over heads and layers. What they pay does not depend on what was evicted, so it is measured once for all policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from benchmarks.tiers._eviction_turns import BLOCK, CacheTurn
from kvfleet.worker.eviction.reuse import ReuseEviction

Masses = NDArray[np.float32]  # of each block
NAME = "measured"


class AttentionMeter:
    def __init__(self, folder: Path) -> None:
        self._rows = torch.empty(0, dtype=torch.int64)
        self._found: list[Tensor] = []
        AttentionInterface.register(NAME, self._attend)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.set_attn_implementation(NAME)

    @torch.inference_mode()
    def masses(self, turn: CacheTurn) -> Masses:
        """The share of one query's attention that each block gets, on average. They sum up to 1."""
        self._rows = torch.arange(turn.prompt - 1, len(turn.ids))
        self._found.clear()
        self._model.model(input_ids=torch.tensor([turn.ids]), use_cache=False)
        mean: Masses = torch.stack(self._found).mean(0).numpy()
        return mean

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        keys = key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)
        scores = scaling * query[0][:, self._rows] @ keys.transpose(1, 2)
        scores.masked_fill_(torch.arange(keys.shape[1]) > self._rows[:, None], float("-inf"))
        paid = scores.softmax(-1).mean((0, 1))
        self._found.append(pad(paid, (0, -len(paid) % BLOCK)).view(-1, BLOCK).sum(1))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None


class AttendedReuse(ReuseEviction):
    """Kinds say as well whether a block got more attention than the median block of its sequence."""

    kinds: ClassVar[int] = 8

    def __init__(self, num_blocks: int, block_size: int, seconds: Callable[[int, int], float]) -> None:
        self.mass = np.zeros(num_blocks, dtype=np.float64)  # decayed, of one query each turn
        self._much = np.zeros(num_blocks, dtype=bool)
        super().__init__(num_blocks, block_size, seconds)

    def attended(self, blocks: Sequence[int], masses: Masses) -> None:
        self._much[blocks] = masses > np.median(masses)

    def kind_of(self, block: int) -> int:
        return 2 * super().kind_of(block) + int(self._much[block])


class AttentionAlone(AttendedReuse):
    """The attention that a block got, half of it after each turnover of the pool, times the seconds to compute it."""

    def attended(self, blocks: Sequence[int], masses: Masses) -> None:
        self.mass[blocks] = self.mass[blocks] * self._left(blocks) + masses

    def stored(self, block: int, block_hash: bytes | None, at: int, before: int | None) -> None:
        super().stored(block, block_hash, at, before)
        self.mass[block] = 0.0

    def score(self, block: int) -> float:
        left = float(self._left([block])[0])
        return float(self.mass[block]) * left * self.seconds(self._at[block] * self._size, self._size)

    def _left(self, blocks: Sequence[int]) -> NDArray[np.float64]:
        ages = np.array([self._clock - self._last[block] for block in blocks])
        left: NDArray[np.float64] = 0.5 ** (ages / self._num_blocks)
        return left
