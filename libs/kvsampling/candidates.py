"""Logits to the most probable tokens of each row, for beam search. As transformers does it: changes (penalties, biases,
banned tokens) are of log probabilities in float32, not of logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvproto.errors import EngineFailure, KvfleetError
from kvproto.messages import TokenLogprobs
from kvsampling.changes import LogitChanges, apply, wants_changes
from kvsampling.draw import ALL_BANNED, NOT_FINITE, Candidates, Draw


def find_candidates(logits: Tensor, draws: Sequence[Draw]) -> list[Candidates | KvfleetError]:
    """Of each row of `logits` `[rows, vocab]` float32, or the error of that row alone."""
    plain = torch.log_softmax(logits, dim=-1)
    found: dict[int, Candidates | KvfleetError] = {}
    changes: dict[int, LogitChanges] = {}
    for row, largest in enumerate(logits.amax(dim=-1).tolist()):
        if not math.isfinite(largest):
            found[row] = EngineFailure(NOT_FINITE)
        elif wants_changes(draws[row]):
            try:
                changes[row] = LogitChanges.of(draws[row], logits.shape[-1])
            except KvfleetError as error:
                found[row] = error
    scores = plain
    if changes:
        changed = torch.tensor(list(changes), device=logits.device)
        some = plain[changed]
        apply(some, list(changes.values()))
        scores = plain.index_copy(0, changed, some)
    vocab = logits.shape[-1]
    count = min(vocab, max(draw.candidates for draw in draws))
    best = scores.topk(count, dim=-1)
    asked = [draw.sampling.logprobs for draw in draws]
    most = min(vocab, max((one or 0 for one in asked), default=0))
    own = plain.gather(-1, best.indices).tolist()
    top = plain.topk(most, dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), own, top.indices.tolist(), top.values.tolist(), strict=True)
    for row, (tokens, values, logprobs, top_ids, top_values) in enumerate(rows):
        if row in found:
            continue
        if values[0] == -math.inf:
            found[row] = EngineFailure(ALL_BANNED)
            continue
        wanted, alternatives = draws[row].candidates, asked[row]
        if alternatives is None:
            found[row] = Candidates(tuple(tokens[:wanted]), tuple(values[:wanted]))
            continue
        beside = TokenLogprobs(0.0, tuple(top_ids[:alternatives]), tuple(top_values[:alternatives]))
        found[row] = Candidates(
            tuple(tokens[:wanted]), tuple(values[:wanted]), tuple(logprobs[:wanted]), beside
        )  # fmt: skip
    return [found[row] for row in range(len(draws))]
