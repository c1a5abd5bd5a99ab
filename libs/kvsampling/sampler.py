"""Logits to tokens, a batch at a time.

A token depends on its own logits and its request's sampling alone, its random number on (seed, choice, index), so that
a sequence that is moved, preempted or replayed draws the same tokens. `sampling.portable` defines which.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvproto.errors import EngineFailure, KvfleetError, OutOfMemory
from kvproto.messages import Sampling, TokenLogprobs
from kvsampling import portable
from kvsampling.candidates import find_candidates
from kvsampling.changes import LogitChanges, apply, wants_changes
from kvsampling.draw import ALL_BANNED, NOT_FINITE, Draw, Drawn, Scored
from kvsampling.portable import DrawSettings, is_greedy, logprobs_of

log = logging.getLogger(__name__)

_NO_MEMORY = (
    "DefaultCPUAllocator",
    "can't allocate memory",
    "not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",  # of the driver, not of torch's allocator
    "HIP out of memory",
    "_STATUS_ALLOC_FAILED",  # CUBLAS, CUDNN, CUSOLVER, CUSPARSE: their workspaces are not the allocator's either
    "ALLOCATION_FAILED",
)

ROWS_AT_ONCE = 16  # bounds the copies of large vocabularies, float32 or float64


class _Way(Protocol):
    """A module that draws on a device: `sampling.cpu` or `sampling.portable`. Logits are float32."""

    def greedy(self, logits: Tensor) -> tuple[list[int], list[float]]: ...

    def draw(self, logits: Tensor, settings: DrawSettings) -> list[int]: ...

    def masses_and_best(self, logits: Tensor, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """One token per row of `logits` `[rows, vocab]`, or the error of that row alone."""
    return begin(logits, draws)()


def begin(logits: Tensor, draws: Sequence[Draw]) -> Callable[[], list[Drawn]]:
    """`sample` in two parts: a device may draw until what this returns is called, which waits."""
    if not draws:
        return list
    try:
        drawing = _begin_both(logits, draws) if any(draw.candidates for draw in draws) else _begin(logits, draws)
    except Exception as error:  # noqa: BLE001 - logged, or given as that row's
        failure = error
        return lambda: _each_alone(logits, draws, failure)

    def drawn() -> list[Drawn]:
        try:
            return drawing()
        except Exception as error:  # noqa: BLE001 - the same
            return _each_alone(logits, draws, error)

    return drawn


def _each_alone(logits: Tensor, draws: Sequence[Draw], error: Exception) -> list[Drawn]:
    if len(draws) == 1:
        return [_failure(error)]
    log.warning("sampling %d rows raised; each is sampled alone", len(draws), exc_info=error)
    return [sample(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]


def score(logits: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprobs]:
    """What the model thinks of `tokens`, one per row of `logits` `[rows, vocab]`: with ranks. Raises EngineFailure."""
    if tokens and logits.device.type in _by_kernels:
        from kvsampling import gpu

        return gpu.begin_scores(logits, tokens, alternatives).result()
    return _score_in_parts(logits, tokens, alternatives)


def _score_in_parts(logits: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprobs]:
    way = _way(logits.device)
    found: list[TokenLogprobs] = []
    for at in range(0, len(tokens), ROWS_AT_ONCE):
        rows, some = logits[at : at + ROWS_AT_ONCE].float(), tokens[at : at + ROWS_AT_ONCE]
        if not all(map(math.isfinite, way.greedy(rows)[1])):
            raise EngineFailure(NOT_FINITE)
        own = rows.gather(-1, torch.tensor(some, device=rows.device)[:, None])
        ranks = (rows >= own).sum(dim=-1).tolist()
        scored = _score(way, rows, some, [alternatives] * len(some))
        found += [replace(one, rank=rank) for one, rank in zip(scored, ranks, strict=True)]
    return found


def warm_up(device: torch.device) -> None:
    """Compile or load what `sample` needs on this device, which takes seconds. A GPU draws and scores by kernels of its
    own once they are tried here, and by tensor operations where they give anything else."""
    if device.type == "cuda" and device.type not in _by_kernels and _kernels_agree(device):
        _by_kernels.add(device.type)
    sample(torch.zeros(1, 8, device=device), [Draw(Sampling(1, logprobs=1), 0, 0)])


_by_kernels: set[str] = set()  # kinds of devices
_TRIED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.7},
    {"min_p": 0.1, "top_k": 40, "top_p": 0.9},
)  # fmt: skip


def _kernels_agree(device: torch.device) -> bool:
    from kvsampling import gpu  # here, so that a CPU's worker does not load Triton

    logits = 3 * torch.randn(4 * len(_TRIED), 3000, generator=torch.Generator().manual_seed(0)).to(device)
    asked = [Sampling(1, seed=at, logprobs=at % 3, **_TRIED[at % len(_TRIED)]) for at in range(len(logits))]
    draws = [Draw(sampling, 0, at) for at, sampling in enumerate(asked)]
    tokens = [at * 7 for at in range(len(logits))]
    try:
        agree = gpu.begin(logits, draws).result() == _sample(logits, draws)
        agree &= gpu.begin_scores(logits, tokens, 2).result() == _score_in_parts(logits, tokens, 2)
    except Exception:
        log.warning("the kernels that draw on %s do not run: tensor operations draw, slower", device, exc_info=True)
        return False
    if not agree:
        log.warning("the kernels that draw on %s draw or score otherwise: tensor operations do, slower", device)
    return agree


def _begin_both(logits: Tensor, draws: Sequence[Draw]) -> Callable[[], list[Drawn]]:
    """Some rows get candidates, the others a token each."""
    beams = [row for row, draw in enumerate(draws) if draw.candidates]
    others = [row for row, draw in enumerate(draws) if not draw.candidates]
    drawn: list[Drawn] = [None] * len(draws)
    drawing = _begin(_rows(logits, others), [draws[row] for row in others]) if others else list
    for rows, some in _parts(beams, draws):
        _put(drawn, rows, find_candidates(_rows(logits, rows), some))

    def result() -> list[Drawn]:
        _put(drawn, others, drawing())
        return drawn

    return result


def _begin(logits: Tensor, draws: Sequence[Draw]) -> Callable[[], list[Drawn]]:
    if logits.device.type in _by_kernels:
        from kvsampling import gpu

        return gpu.begin(logits, draws).result
    drawn = _sample(logits, draws)
    return lambda: drawn


def _sample(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    way = _way(logits.device)
    drawn: list[Drawn] = [None] * len(draws)
    plain: list[int] = []
    changed: list[int] = []
    for row, draw in enumerate(draws):
        (changed if wants_changes(draw) else plain).append(row)
    for rows, some in _parts(plain, draws):
        _put(drawn, rows, _draw(way, _rows(logits, rows), some, NOT_FINITE))
    for rows, some in _parts(changed, draws):
        _put(drawn, rows, _draw_changed(way, _rows(logits, rows), some))
    scored = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    for rows, some in _parts([row for row in scored if isinstance(drawn[row], int)], draws):
        tokens = [token for row in rows if isinstance(token := drawn[row], int)]
        logprobs = _score(way, _rows(logits, rows), tokens, [one.sampling.logprobs or 0 for one in some])
        _put(drawn, rows, [Scored(*one) for one in zip(tokens, logprobs, strict=True)])
    return drawn


def _draw(way: _Way, logits: Tensor, draws: Sequence[Draw], why_not: str) -> list[Drawn]:
    """EngineFailure where the largest logit is not finite."""
    tokens, peaks = way.greedy(logits)
    drawn: list[Drawn] = list(tokens)
    random: list[int] = []
    for row, draw in enumerate(draws):
        if not math.isfinite(peaks[row]):
            drawn[row] = EngineFailure(why_not)
        elif not is_greedy(draw.sampling):
            random.append(row)
    if random:
        settings = DrawSettings.of([draws[row] for row in random], logits.shape[-1])
        _put(drawn, random, way.draw(_rows(logits, random), settings))
    return drawn


def _draw_changed(way: _Way, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    _, peaks = way.greedy(logits)
    drawn: list[Drawn] = [None] * len(draws)
    changes: dict[int, LogitChanges] = {}
    for row, draw in enumerate(draws):
        try:
            if not math.isfinite(peaks[row]):
                raise EngineFailure(NOT_FINITE)
            changes[row] = LogitChanges.of(draw, logits.shape[-1])
        except KvfleetError as error:
            drawn[row] = error
    if changes:
        rows = list(changes)
        chosen = _rows(logits, rows).clone()
        apply(chosen, list(changes.values()))
        _put(drawn, rows, _draw(way, chosen, [draws[row] for row in rows], ALL_BANNED))
    return drawn


def _score(way: _Way, logits: Tensor, tokens: Sequence[int], asked: Sequence[int]) -> list[TokenLogprobs]:
    """The model's own log probabilities of the tokens and of `asked` alternatives."""
    masses, best = way.masses_and_best(logits, min(max(1, *asked), logits.shape[-1]))
    ids = np.column_stack((np.array(tokens, dtype=np.int64), best))
    values = logits.gather(-1, torch.from_numpy(ids).to(logits.device)).double().tolist()
    return [
        logprobs_of(*found, logits.shape[-1])
        for found in zip(masses.tolist(), best.tolist(), values, asked, strict=True)
    ]


def _failure(error: Exception) -> KvfleetError:
    if isinstance(error, KvfleetError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory("sampling a token does not fit into memory")
    return EngineFailure(f"sampling failed: {type(error).__name__}: {error}")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: torch tells for CUDA by type, for the host only in words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


def _parts(rows: Sequence[int], draws: Sequence[Draw]) -> Iterator[tuple[Sequence[int], list[Draw]]]:
    """Some rows at a time, each with its draw."""
    for at in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[at : at + ROWS_AT_ONCE]
        yield some, [draws[row] for row in some]


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows (ascending) in float32: a view where that is possible."""
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows):
        return logits[first : last + 1].float()
    return logits[torch.tensor(rows, device=logits.device)].float()


def _put(drawn: list[Drawn], rows: Sequence[int], found: Sequence[Drawn]) -> None:
    for row, one in zip(rows, found, strict=True):
        drawn[row] = one


def _way(device: torch.device) -> _Way:
    if device.type != "cpu":
        return portable
    from kvsampling import cpu  # here, so that a GPU worker does not load compiled kernels

    return cpu
