"""Draws and scores on a GPU: all rows together, and the host waits once, when it reads what was found.

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
from kvproto.messages import TokenLogprobs
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
        rows, scored, count = len(self.draws), len(self.scored), self.count
        sizes = (rows, rows, rows, scored, scored * count, scored * (count + 1))
        tokens, peaks, left, masses, best, values = _read(self._packed, self._event, sizes)
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


@dataclass(frozen=True, slots=True)
class PendingScores:
    """What a device finds of given tokens. `result` waits for it."""

    rows: int
    vocab: int
    asked: int  # alternatives of each
    count: int  # that are computed
    _packed: Tensor  # on the host, once `_event` is there
    _event: Any

    def result(self) -> list[TokenLogprobs]:
        """One of each row. Raises EngineFailure."""
        rows, count = self.rows, self.count
        sizes = (rows, rows, rows, rows * count, rows * (count + 1))
        peaks, ranks, masses, best, values = _read(self._packed, self._event, sizes)
        if not np.isfinite(peaks.view(np.float64)).all():
            raise EngineFailure(NOT_FINITE)
        told = values.view(np.float64).reshape(rows, count + 1).tolist()
        ids = best.reshape(rows, count).tolist()
        return [
            replace(logprobs_of(mass, its, logits, self.asked, self.vocab), rank=rank)
            for mass, its, logits, rank in zip(masses.tolist(), ids, told, ranks.tolist(), strict=True)
        ]


def begin_scores(logits: Tensor, tokens: Sequence[int], alternatives: int) -> PendingScores:
    """Of one token for each row of `logits` `[rows, vocab]`: at least one. Waits for nothing."""
    rows, vocab = logits.shape
    own = logits.float()
    peaks = own.amax(dim=-1)
    count = min(max(1, alternatives), vocab)
    given = moved(np.array(tokens, dtype=np.int64), logits.device)[:, None]
    ranks = (own >= own.gather(-1, given)).sum(dim=-1)
    parts = [_bits(peaks), ranks, *_scored(own, peaks, given, count)]
    packed, event = _fetched(torch.cat([part.reshape(-1) for part in parts]))
    return PendingScores(rows, vocab, alternatives, count, packed, event)


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
        parts += _scored(own[at], peaks[at], tokens[at][:, None], count)
    packed, event = _fetched(torch.cat([part.reshape(-1) for part in parts]))
    return PendingDraws(draws, vocab, scored, count, errors, changed, packed, event)


def _scored(logits: Tensor, peaks: Tensor, tokens: Tensor, count: int) -> list[Tensor]:
    """Masses, ids of the largest logits, and the logits of `tokens` `[rows, 1]` and of those."""
    natural = moved(np.array([NATURAL]), logits.device)
    masses, best = kernels.masses_and_best(logits, peaks, natural, count, weight_bits(logits.shape[-1]))
    return [masses, best, _bits(logits.gather(-1, torch.cat((tokens, best), dim=-1)))]


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


def _read(packed: Tensor, event: Any, sizes: Sequence[int]) -> list[Ints]:
    """Its parts, of so many numbers each."""
    if event is not None:
        event.synchronize()
    return np.split(packed.numpy(), np.cumsum(sizes)[:-1])
