"""Draws on a GPU: all rows of a step together, and the host waits once, when it reads what was drawn.

host     arrays of all rows ──pinned──▶ device                                        ──▶ results read
device                        changes ─▶ draws ─▶ scores ─▶ one array ──pinned copy──▶ event
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvgpu.sampling import draw as kernels
from kvproto.errors import EngineFailure, KvfleetError
from kvsampling.changes import LogitChanges, apply, moved, wants_changes
from kvsampling.draw import ALL_BANNED, NOT_FINITE, Draw, Drawn, Scored
from kvsampling.portable import NATURAL, DrawSettings, is_greedy, logprobs_of, weight_bits

Ints = npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class PendingDraws:
    """What a device is drawing. `result` waits for it."""

    draws: Sequence[Draw]
    vocab: int
    scored: list[int]  # rows
    count: int  # of alternatives, of each
    errors: dict[int, KvfleetError]  # of rows that cannot be changed as asked
    changed: list[int]  # rows
    _packed: Tensor  # on the host, once `_event` is there
    _event: Any

    def result(self) -> list[Drawn]:
        """One token per row, or the error of that row alone."""
        if self._event is not None:
            self._event.synchronize()
        rows, scored, count = len(self.draws), len(self.scored), self.count
        sizes = (rows, rows, rows, scored, scored * count, scored * (count + 1))
        tokens, peaks, left, masses, best, values = np.split(self._packed.numpy(), np.cumsum(sizes)[:-1])
        finite, any_left = (np.isfinite(one.view(np.float64)) for one in (peaks, left))
        drawn: list[Drawn] = list(tokens.tolist())
        for row, error in self.errors.items():
            drawn[row] = error
        for row in self.changed:
            if not any_left[row]:
                drawn[row] = EngineFailure(ALL_BANNED)
        for row in np.flatnonzero(~finite).tolist():
            drawn[row] = EngineFailure(NOT_FINITE)
        told = values.view(np.float64).reshape(scored, count + 1).tolist()
        ids = best.reshape(scored, count).tolist()
        for row, mass, its, logits in zip(self.scored, masses.tolist(), ids, told, strict=True):
            token, asked = drawn[row], self.draws[row].sampling.logprobs or 0
            if isinstance(token, int):
                drawn[row] = Scored(token, logprobs_of(mass, its, logits, asked, self.vocab))
        return drawn


def begin(logits: Tensor, draws: Sequence[Draw]) -> PendingDraws:
    """Of `logits` `[rows, vocab]`. Waits for nothing."""
    device, vocab = logits.device, logits.shape[-1]
    own = logits.float()
    peaks = own.amax(dim=-1)
    settings = _settings(draws, vocab)
    changed, errors = [], dict[int, KvfleetError]()
    changes: list[LogitChanges] = []
    for row, draw in enumerate(draws):
        if wants_changes(draw):
            try:
                changes.append(LogitChanges.of(draw, vocab))
                changed.append(row)
            except KvfleetError as error:
                errors[row] = error
    used, left = own, peaks
    if changed:
        at = moved(np.array(changed), device)
        some = own[at]
        apply(some, changes)
        used = own.index_copy(0, at, some)
        left = used.amax(dim=-1)
    asked = (settings.scale, settings.top_k, settings.top_p, settings.least, settings.points)
    scale, top_k, top_p, least, points = (moved(one, device) for one in asked)
    tokens = kernels.draw(used, left, scale, top_k, top_p, least, points, settings.bits)
    scored = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    count = min(max([1, *(draws[row].sampling.logprobs or 0 for row in scored)]), vocab)
    parts = [tokens, _bits(peaks), _bits(left)]
    if scored:
        at = moved(np.array(scored), device)
        theirs = own[at]
        natural = moved(np.array([NATURAL]), device)
        masses, best = kernels.masses_and_best(theirs, peaks[at], natural, count, weight_bits(vocab))
        ids = torch.cat((tokens[at][:, None], best), dim=-1)
        parts += [masses, best, _bits(theirs.gather(-1, ids))]
    packed, event = _fetched(torch.cat([part.reshape(-1) for part in parts]))
    return PendingDraws(draws, vocab, scored, count, errors, changed, packed, event)


def _settings(draws: Sequence[Draw], vocab: int) -> DrawSettings:
    settings = DrawSettings.of(draws, vocab)
    greedy = np.array([is_greedy(draw.sampling) for draw in draws])
    return replace(settings, points=np.where(greedy, kernels.GREEDY, settings.points))


def _bits(values: Tensor) -> Tensor:
    """As whole numbers that hold the same float64."""
    return values.double().contiguous().view(torch.int64)


def _fetched(packed: Tensor) -> tuple[Tensor, Any]:
    """On the host, once the event is there."""
    if packed.device.type != "cuda":
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(packed.device))
    return host, event
