"""A logits processor of vLLM's that draws as kvfleet's own engine does.

--logits-processors kvfleet_vllm.sampler:Sampler
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from kvfleet_vllm.row_sampling import SampledRow, choose, sampling_of
from kvfleet_vllm.wire import KEY
from kvsampling.sampler import warm_up


class Sampler(LogitsProcessor):  # type: ignore[misc]
    """The form of vLLM's first model runner. Requests that do not ask for it are not touched."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, SampledRow] = {}
        warm_up(device)

    @classmethod
    def validate_params(cls, params: Any) -> None:
        asked = (params.extra_args or {}).get(KEY)
        if asked is not None:
            sampling_of(asked)
            if params.temperature != 0:
                raise ValueError(f"{KEY} draws, so vLLM's own temperature must be 0")

    def is_argmax_invariant(self) -> bool:
        return False  # so that it runs for greedy requests too

    def update_state(self, update: Any) -> None:
        if update is not None:
            self._follow(update)
        for row in self._rows.values():
            row.prepare()

    def _follow(self, update: Any) -> None:
        for row in update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, outputs in update.added:
            self._rows.pop(row, None)
            if (asked := (params.extra_args or {}).get(KEY)) is not None:
                self._rows[row] = SampledRow.of(asked, prompt or (), outputs)
        for source, target, direction in update.moved:
            one, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if one is not None:
                self._rows[target] = one
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        choose(logits, self._rows)
        return logits
