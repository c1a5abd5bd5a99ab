"""Draws on a CPU: calls the compiled kernels, on as many threads as torch was given."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcpu.sampling import sampling_call as c
from kvcpu.vector import team
from kvcpu.vector.compiled import entry
from kvsampling.portable import NATURAL, DrawSettings, weight_bits

Fields: TypeAlias = dict[int, npt.NDArray[Any] | int]
UNDONE = np.int64(-1)  # neither a token nor a sum of weights


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """As in `portable`."""
    rows = _array(logits)
    tokens = rows.argmax(axis=-1)  # numpy's is many times faster than torch's
    peaks: list[float] = rows[np.arange(len(rows)), tokens].tolist()
    return tokens.tolist(), peaks


def draw(logits: Tensor, settings: DrawSettings) -> list[int]:
    """Raises MemoryError."""
    tokens = np.full(len(logits), UNDONE)
    fields: Fields = {
        c.BITS: settings.bits,
        c.SCALE: settings.scale,
        c.TOP_K: settings.top_k,
        c.TOP_P: settings.top_p,
        c.LEAST: settings.least,
        c.POINTS: settings.points,
        c.TOKENS: tokens,
    }
    _run("draw_share", logits, fields, tokens)
    drawn: list[int] = tokens.tolist()
    return drawn


def masses_and_best(logits: Tensor, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """As in `portable`."""
    masses, best = np.full(len(logits), UNDONE), np.zeros((len(logits), count), np.int64)
    scale, bits = np.array([NATURAL]), weight_bits(logits.shape[-1])
    fields: Fields = {c.BITS: bits, c.SCALE: scale, c.MASSES: masses, c.COUNT: count, c.BEST: best}
    _run("masses_share", logits, fields, masses)
    return masses, best


def _run(kernel: str, logits: Tensor, fields: Fields, results: npt.NDArray[np.int64]) -> None:
    """`fields` of the call block: numbers, and contiguous arrays. Raises MemoryError where a result is UNDONE, as
    compiled code that cannot allocate ends early without an error."""
    rows = _array(logits)
    block = np.zeros(c.FIELDS, np.int64)
    block[c.SELF], block[c.LOGITS] = block.ctypes.data, rows.ctypes.data
    block[c.ROWS], block[c.VOCAB] = rows.shape
    for field, value in fields.items():
        block[field] = value if isinstance(value, int) else value.ctypes.data
    function = entry("kvcpu.sampling.sampling_kernels", kernel)
    team.run(function.address, block.ctypes.data, min(torch.get_num_threads(), len(rows)))
    if (results == UNDONE).any():
        raise MemoryError("a draw does not fit into memory")


def _array(logits: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.detach().float().contiguous().numpy()
    return array
