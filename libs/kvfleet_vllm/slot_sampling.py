"""Rows of the batch of vLLM's second model runner, which keeps its requests in slots. Knows nothing of vLLM.

That runner hands a processor no lists of ids. They lie on the device, a row for each slot, and its last token may be
still on its way there when the host schedules the next: only a request with penalties or a grammar has its ids
fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvfleet_vllm.row_sampling import SampledRow, choose


@dataclass(eq=False, slots=True)
class SlotSampling:
    """`ids(slot, count)` fetches the first ids of a slot's sequence from the device."""

    ids: Callable[[int, int], Sequence[int]]
    _slots: dict[int, _Slot] = field(default_factory=dict)

    def add(self, slot: int, asked: Mapping[str, Any] | None) -> bool:
        """Another request is in the slot now. Whether it is drawn for."""
        self._slots.pop(slot, None)
        if asked is not None:
            self._slots[slot] = _Slot.of(asked)
        return asked is not None

    def choose(
        self, logits: Tensor, slots: Sequence[int], lengths: Sequence[int], prompts: Sequence[int], fills: Sequence[int]
    ) -> None:
        """Change `logits` `[batch, vocab]` in place, as `row_sampling.choose` does. Of each row: its slot, how many ids
        the model has seen, how many of them are vLLM's prompt, and how many it must have seen before it draws."""
        rows: dict[int, SampledRow] = {}
        for at, (slot, length, prompt, fill) in enumerate(zip(slots, lengths, prompts, fills, strict=True)):
            one = self._slots.get(slot)
            if one is not None and length >= fill:  # else it is a part of a prompt, whose token vLLM drops
                ids = self.ids(slot, length) if one.reads_ids else range(length)  # then only their count matters
                rows[at] = one.see(ids, prompt)
        choose(logits, rows)


@dataclass(eq=False, slots=True)
class _Slot:
    row: SampledRow
    prompt: int  # of the worker, in tokens, which may end before vLLM's
    dropped: Sequence[int]  # of the prompt's beginning, which vLLM has not got
    reads_ids: bool

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> _Slot:
        row = SampledRow.of(asked, (), ())
        wants = row.sampling
        penalties = wants.presence_penalty or wants.frequency_penalty or wants.repetition_penalty != 1
        return cls(row, asked["prompt"], asked["dropped"], bool(penalties or row.matcher))

    def see(self, ids: Sequence[int], prompt: int) -> SampledRow:
        """`ids` are vLLM's prompt, of `prompt` tokens, and its outputs."""
        whole = [*self.dropped, *ids] if self.dropped else ids
        prompt += len(self.dropped)
        self.row.prompt, self.row.before, self.row.outputs = (
            whole[: self.prompt],
            whole[self.prompt : prompt],
            whole[prompt:],
        )
        return self.row
