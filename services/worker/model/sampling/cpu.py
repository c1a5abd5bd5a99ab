"""Draws on a CPU: hands tensors to the compiled kernels, on as many threads as torch was given."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.model.sampling import kernels
from services.worker.model.sampling.weights import NATURAL, DrawSettings, weight_bits

ROWS_AT_ONCE = 16  # bounds the float32 copies of large vocabularies to what the allocator keeps at hand


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """Of each row the first of the largest logits, and that logit: NaN where any is."""
    rows = _array(logits)
    tokens = rows.argmax(axis=-1)  # numpy's is many times faster than torch's
    peaks: list[float] = rows[np.arange(len(rows)), tokens].tolist()
    return tokens.tolist(), peaks


def draw(logits: Tensor, settings: DrawSettings) -> list[int]:
    """One token per row."""
    _use_threads()
    tokens: list[int] = kernels.draw(
        _array(logits),
        settings.bits,
        settings.scale,
        settings.top_k,
        settings.top_p,
        settings.least,
        settings.points,
    ).tolist()
    return tokens


def masses_and_best(logits: Tensor, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`[rows]` sums of all weights at temperature 1; `[rows, count]` ids of the largest, equal ones in id order."""
    _use_threads()
    best = np.zeros((len(logits), count), np.int64)
    return kernels.masses_and_best(_array(logits), weight_bits(logits.shape[-1]), NATURAL, best), best


def _array(logits: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.detach().float().contiguous().numpy()
    return array


def _use_threads() -> None:
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
