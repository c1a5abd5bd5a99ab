"""Draws on a CPU: hands tensors to the compiled kernels, on as many threads as torch was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcpu.sampling import sampling_call as c
from kvcpu.vector import team
from kvcpu.vector.compiled import CompiledEntry, entry
from kvfleet.worker.model.sampling.weights import NATURAL, DrawSettings, weight_bits

KERNELS = "kvcpu.sampling.sampling_kernels"
UNDONE = np.int64(-1)  # neither a token nor a sum of weights
ROWS_AT_ONCE = 16  # bounds the float32 copies of large vocabularies to what the allocator keeps at hand


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """Of each row the first of the largest logits, and that logit: NaN where any is."""
    rows = _array(logits)
    tokens = rows.argmax(axis=-1)  # numpy's is many times faster than torch's
    peaks: list[float] = rows[np.arange(len(rows)), tokens].tolist()
    return tokens.tolist(), peaks


def draw(logits: Tensor, settings: DrawSettings) -> list[int]:
    """One token per row."""
    tokens = np.full(len(logits), UNDONE)
    arrays: dict[int, npt.NDArray[Any]] = {
        c.LOGITS: _array(logits),
        c.SCALE: settings.scale,
        c.TOP_K: settings.top_k,
        c.TOP_P: settings.top_p,
        c.LEAST: settings.least,
        c.POINTS: settings.points,
        c.TOKENS: tokens,
    }
    _run(entry(KERNELS, "draw_share"), logits, settings.bits, arrays)
    _check_done(tokens)
    drawn: list[int] = tokens.tolist()
    return drawn


def masses_and_best(logits: Tensor, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`[rows]` sums of all weights at temperature 1; `[rows, count]` ids of the largest, equal ones in id order."""
    masses, best = np.full(len(logits), UNDONE), np.zeros((len(logits), count), np.int64)
    arrays: dict[int, npt.NDArray[Any]] = {
        c.LOGITS: _array(logits),
        c.SCALE: np.array([NATURAL]),
        c.MASSES: masses,
        c.BEST: best,
    }
    _run(entry(KERNELS, "masses_share"), logits, weight_bits(logits.shape[-1]), arrays, count)
    _check_done(masses)
    return masses, best


def _run(
    function: CompiledEntry, logits: Tensor, bits: int, arrays: dict[int, npt.NDArray[Any]], count: int = 0
) -> None:
    """`arrays` by their field of the call block; each must be contiguous."""
    block = np.zeros(c.FIELDS, np.int64)
    block[c.SELF], block[c.COUNT] = block.ctypes.data, count
    block[c.ROWS], block[c.VOCAB], block[c.BITS] = *logits.shape, bits
    for field, array in arrays.items():
        block[field] = array.ctypes.data
    team.run(function.address, block.ctypes.data, min(torch.get_num_threads(), len(logits)))


def _check_done(results: npt.NDArray[np.int64]) -> None:
    """Compiled code that cannot allocate ends early and can tell nobody. Raises MemoryError."""
    if (results == UNDONE).any():
        raise MemoryError("a draw does not fit into memory")


def _array(logits: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.detach().float().contiguous().numpy()
    return array
