"""Changes of logits before a token is drawn: penalties, biases, banned tokens, grammars, in the order that
`kvproto.messages.Sampling` states. All rows change at once, computed in float64 and stored as float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvproto.errors import InvalidRequest
from kvsampling.draw import Draw

if TYPE_CHECKING:
    from kvsampling.grammar import Mask

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
LARGEST_BIAS = 1e30  # added to a logit, still a float32
NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Token ids of one request, all within the vocabulary, and their changes."""

    seen: Ints  # in prompt or output, with repeats
    repetition_penalty: float
    generated: Ints
    lowered: Floats  # subtracted from the logits of the generated ones
    biased: Ints
    biases: Floats
    banned: Ints
    allowed: Mask | None

    @classmethod
    def of(cls, draw: Draw, vocab: int) -> LogitChanges:
        """Raises InvalidRequest that names the field."""
        asked = draw.sampling
        output = _ids(draw.output_ids, vocab, "output_ids")
        seen = generated = counts = NOTHING
        if asked.repetition_penalty != 1:
            seen = np.concatenate((_ids(draw.prompt_ids, vocab, "prompt_ids"), output))
        if _counts(draw):
            generated, counts = np.unique(output, return_counts=True)
        biases = np.array(list(asked.logit_bias.values()), dtype=np.float64)
        if not (np.abs(biases) <= LARGEST_BIAS).all():
            raise InvalidRequest(f"a bias is beyond +-{LARGEST_BIAS:.0e}", field="logit_bias")
        allowed = None if draw.matcher is None else draw.matcher.mask(draw.output_ids)
        is_over = draw.matcher is not None and draw.matcher.is_over
        banned = np.array(() if is_over else draw.banned, dtype=np.int64)
        return cls(
            seen=seen,
            repetition_penalty=asked.repetition_penalty,
            generated=generated,
            lowered=asked.frequency_penalty * counts.astype(np.float64) + asked.presence_penalty,
            biased=_ids(list(asked.logit_bias), vocab, "logit_bias"),
            biases=biases,
            banned=banned[(banned >= 0) & (banned < vocab)],
            allowed=allowed,
        )


def wants_changes(draw: Draw) -> bool:
    asked = draw.sampling
    return bool(asked.repetition_penalty != 1 or _counts(draw) or asked.logit_bias or draw.banned or draw.matcher)


def apply(logits: Tensor, changes: Sequence[LogitChanges]) -> None:
    """Change `logits` `[rows, vocab]` float32 in place."""
    penalties = [one.repetition_penalty for one in changes]
    _change(logits, [one.seen for one in changes], penalties, lambda old, by: torch.where(old < 0, old * by, old / by))
    _change(logits, [one.generated for one in changes], [one.lowered for one in changes], torch.sub)
    _change(logits, [one.biased for one in changes], [one.biases for one in changes], torch.add)
    _change(logits, [one.banned for one in changes], [-math.inf] * len(changes), lambda _, minus: minus)
    for row, one in enumerate(changes):
        if one.allowed is not None:
            logits[row].masked_fill_(moved(~one.allowed, logits.device), -math.inf)


def _change(
    logits: Tensor, ids: Sequence[Ints], values: Sequence[Floats | float], changed: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """The logits of each row's `ids` become `changed(logits, values)`; values are one per id or per row. A repeated id
    is read before any is written, so it is changed once."""
    lengths = [len(one) for one in ids]
    if not any(lengths):
        return
    device = logits.device
    rows = np.repeat(np.arange(len(ids)), lengths)
    at = moved(rows, device), moved(np.concatenate(ids), device)
    beside = np.concatenate([np.broadcast_to(value, length) for value, length in zip(values, lengths, strict=True)])
    logits[at] = changed(logits[at].double(), moved(beside, device)).float()


def moved(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """There; the host does not wait for a GPU."""
    held = torch.from_numpy(np.ascontiguousarray(values))
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)


def _counts(draw: Draw) -> bool:
    return draw.sampling.frequency_penalty != 0 or draw.sampling.presence_penalty != 0


def _ids(ids: Sequence[int], vocab: int, field: str) -> Ints:
    try:
        found = np.asarray(ids, dtype=np.int64)
    except OverflowError:
        raise InvalidRequest(f"a token is not one of the model's {vocab}", field=field) from None
    if len(found) and not 0 <= found.min() <= found.max() < vocab:
        wrong = found[(found < 0) | (found >= vocab)][0]
        raise InvalidRequest(f"token {wrong} is not one of the model's {vocab}", field=field)
    return found
