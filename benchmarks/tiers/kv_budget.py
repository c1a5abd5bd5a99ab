"""Perplexity of the demo model where a context must fit a budget: what was attended to, against a sliding window.

    python -m benchmarks.kv_budget [--quick]

Held-out text (the last tenth of shared/data/shakespeare.txt, which training never saw) in contexts of 3,072 tokens, fed
64 at a time. Before each 64 the KV that is beyond the budget goes, in blocks of 16, for all layers alike; what stays
keeps its rotary positions. Forms: the last blocks (`window`); the first block and the last ones (`sink`, StreamingLLM,
arXiv:2309.17453); the first block, the last half of the budget, and the blocks that the newest 64 tokens attended to
most (`attended`, as SnapKV, arXiv:2404.14469), or with older queries counting half as much every 6.6 chunks
(`attended_decayed`, as H2O, arXiv:2306.14048).

`value` is the perplexity of the better attended form over that of the better window, at the smallest budget; `whole` is
that of the context without a budget. Below `floor` attention would be worth its sampling, and docs/eviction.md wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

import kvfleet.worker
from benchmarks.harness.report import finish, parse_quick, progress, skip

NAME, UNIT = "kv_budget", "times the perplexity of a window"
FOLDER = Path(kvfleet.worker.__file__).parent / "model" / "demo_model"
TEXT = "shared/data/shakespeare.txt"
HELD_OUT, CONTEXT, CHUNK, BLOCK = 0.1, 3072, 64, 16
BUDGETS, QUICK_BUDGETS = (256, 512), (256,)
CONTEXTS, QUICK_CONTEXTS = 8, 2
FORMS: dict[str, float | None] = {"window": None, "sink": None, "attended": 0.0, "attended_decayed": 0.9}
FLOOR = 0.98


@dataclass(eq=False)
class BudgetedCache:
    """K and V of each layer, `[kv_heads, tokens, head_dim]`, and what the newest chunk paid to each token of them."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    paid: dict[int, Tensor] = field(default_factory=dict)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        layer, count = module.layer_idx, query.shape[2]
        if layer in self.keys:
            key = torch.cat([self.keys[layer][None], key], 2)
            value = torch.cat([self.values[layer][None], value], 2)
        self.keys[layer], self.values[layer] = key[0], value[0]
        grouped = query[0].view(key.shape[1], -1, count, query.shape[3])
        scores = scaling * grouped @ key[0][:, None].transpose(2, 3)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(key.shape[2] - count)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        self.paid[layer] = weights.mean((0, 1, 2))
        return (weights @ value[0][:, None]).flatten(0, 1).transpose(0, 1)[None].contiguous(), None

    def blocks_paid(self) -> NDArray[np.float64]:
        total: NDArray[np.float64] = sum(self.paid.values(), torch.zeros(1)).view(-1, BLOCK).sum(1).double().numpy()
        return total

    def keep(self, blocks: list[int]) -> None:
        rows = torch.tensor([block * BLOCK + at for block in blocks for at in range(BLOCK)])
        for layer in self.keys:
            self.keys[layer] = self.keys[layer][:, rows].contiguous()
            self.values[layer] = self.values[layer][:, rows].contiguous()


def kept_blocks(form: str, count: int, room: int, salience: NDArray[np.float64]) -> list[int]:
    """Which of `count` blocks stay where there is room for `room`."""
    if form == "window":
        return list(range(count - room, count))
    recent = room - 1 if form == "sink" else room // 2
    between = np.arange(1, count - recent)
    best = between[np.argsort(-salience[between], kind="stable")[: room - 1 - recent]]
    return [0, *sorted(best.tolist()), *range(count - recent, count)]


@torch.inference_mode()
def losses(model: Any, cache: BudgetedCache, ids: list[int], form: str, budget: int) -> NDArray[np.float64]:
    """Nats of each token but the first. `budget` 0: none."""
    cache.__init__()  # type: ignore[misc]
    salience, found = np.zeros(0), []
    for start in range(0, len(ids), CHUNK):
        chunk, targets = ids[start : start + CHUNK], ids[start + 1 : start + CHUNK + 1]
        positions = torch.arange(start, start + len(chunk))[None]
        logits = model(input_ids=torch.tensor([chunk]), position_ids=positions, use_cache=False).logits[0]
        scores = logits[: len(targets)].log_softmax(-1)
        found.append(-scores[torch.arange(len(targets)), torch.tensor(targets)].double().numpy())
        paid, decay = cache.blocks_paid(), FORMS.get(form) or 0.0
        salience = decay * np.pad(salience, (0, len(paid) - len(salience))) + paid
        room = (budget - CHUNK) // BLOCK
        if budget and len(salience) > room:
            kept = kept_blocks(form, len(salience), room, salience)
            cache.keep(kept)
            salience = salience[kept]
    return np.concatenate(found)


def main() -> None:
    quick = parse_quick(__doc__)
    budgets, contexts = (QUICK_BUDGETS, QUICK_CONTEXTS) if quick else (BUDGETS, CONTEXTS)
    places = [place / TEXT for place in Path(__file__).parents]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        skip(NAME, UNIT, floor=FLOOR, peer=TEXT, why=f"no {TEXT} here or above")
    text = path.read_text()
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    held_out = tokenizer(text[-int(len(text) * HELD_OUT) :], add_special_tokens=False).input_ids
    step = CONTEXT - 1
    texts = [[0, *held_out[at : at + step]] for at in range(0, len(held_out) - step, step)][:contexts]
    cache = BudgetedCache()
    AttentionInterface.register(NAME, cache.attend)
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model.set_attn_implementation(NAME)
    found: dict[str, dict[str, float]] = {}
    after = max(budgets)  # the same tokens for all

    def perplexity(form: str, budget: int) -> float:
        every = np.concatenate([losses(model, cache, ids, form, budget)[after:] for ids in texts])
        return round(math.exp(every.mean()), 4)

    whole = perplexity("whole", 0)
    progress(f"whole context: {whole}")
    for budget in budgets:
        found[str(budget)] = {form: perplexity(form, budget) for form in FORMS}
        progress(f"budget of {budget}: {found[str(budget)]}")
    least = found[str(budgets[0])]
    ratio = min(least["attended"], least["attended_decayed"]) / min(least["window"], least["sink"])
    finish(
        NAME,
        round(ratio, 5),
        UNIT,
        floor=FLOOR,
        ok=ratio >= FLOOR,
        peer="the last blocks, with and without the first",
        whole=whole,
        perplexity=found,
        contexts=len(texts),
        tokens=len(texts) * (CONTEXT - 1 - after),
    )


if __name__ == "__main__":
    main()
