"""Products of a tile of tokens with any number of rows, against torch in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from kvcpu.vector import conversion
from kvcpu.vector.products import MOST_ROWS, pair_dots, pair_weigh, tiled, weigh
from kvcpu.vector.rows import row_exp_halves

TOKENS = 16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)))


@pytest.fixture(params=[True, False], ids=["instruction", "portable"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], Any]:
    """Compiles with and without the processor's own instruction for pairs."""
    if request.param and not conversion.multiplies_pairs():
        pytest.skip("this processor does not multiply bfloat16 by itself")
    monkeypatch.setattr(conversion, "multiplies_pairs", lambda: request.param)
    return njit  # type: ignore[no-any-return]


@njit  # type: ignore[untyped-decorator]
def add_weighed(rows: int, weights: int, values: int, stride: int, count: int, sums: int, ahead: int) -> None:
    weigh(rows, weights, 64, values, stride, count, sums, 256, ahead, 128)


@pytest.mark.parametrize("count", [1, 7, 16])
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_weighed_sums(rows: int, count: int) -> None:
    """Of the first two vectors of each token, into the first two of each row; nothing else is touched."""
    weights, values, sums = normal(MOST_ROWS, TOKENS), normal(TOKENS, 48), normal(MOST_ROWS, 64, seed=5)
    wanted = sums.double()
    wanted[:rows, :32] += weights[:rows, :count].double() @ values[:count, :32].double()
    values[count:] = float("nan")
    add_weighed(rows, weights.data_ptr(), values.data_ptr(), 4 * 48, count, sums.data_ptr(), values.data_ptr())
    assert (sums - wanted).abs().max() < 1e-5


multiply = tiled((2, 4), (1, 4))


@njit  # type: ignore[untyped-decorator]
def add_scaled(factor: int, row: int, sums: int, columns: int) -> None:
    multiply(1, columns, factor, 4, row, 4, 1, sums, 4)


@pytest.mark.parametrize("columns", [1, 2, 4, 5])
def test_a_product_with_all_but_the_columns_known_when_it_is_compiled(columns: int) -> None:
    """LLVM made nothing of it: it took the offset of the first column, 0, for a null pointer."""
    factor, row, sums = normal(1), normal(columns * TOKENS), normal(columns * TOKENS, seed=5)
    wanted = sums + factor * row
    add_scaled(factor.data_ptr(), row.data_ptr(), sums.data_ptr(), columns)
    assert (sums - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("size", [32, 64, 96, 256])
def test_dots_of_pairs(size: int, compiled: Callable[[Callable[..., None]], Any]) -> None:
    @compiled
    def dot(query: int, keys: int, stride: int, size: int, scores: int) -> None:
        pair_dots(query, keys, stride, size, scores)

    query, keys, scores = normal(size).bfloat16(), normal(TOKENS, size + 32).bfloat16(), torch.zeros(TOKENS + 1)
    dot(query.data_ptr(), keys.data_ptr(), 2 * (size + 32), size, scores.data_ptr())
    assert (scores[:TOKENS] - keys[:, :size].double() @ query.double()).abs().max() < 1e-4
    assert scores[TOKENS] == 0


@pytest.mark.parametrize("size", [32, 64, 96])
def test_weighed_sums_of_pairs(size: int, compiled: Callable[[Callable[..., None]], Any]) -> None:
    @compiled
    def add(rows: int, weights: int, values: int, stride: int, size: int, sums: int) -> None:
        pair_weigh(rows, weights, 64, values, stride, size, sums, 512, values)

    weights, values = normal(MOST_ROWS, 2 * TOKENS).bfloat16(), normal(TOKENS, size + 32).bfloat16()
    for rows in range(1, MOST_ROWS + 1):
        sums = normal(MOST_ROWS, 128, seed=5)
        wanted = sums.double()
        wanted[:rows, :size] += weights[:rows, :TOKENS].double() @ values[:, :size].double()
        add(rows, weights.data_ptr(), values.data_ptr(), 2 * (size + 32), size, sums.data_ptr())
        assert (sums - wanted).abs().max() < 1e-4


@njit  # type: ignore[untyped-decorator]
def exp_halves(row: int, count: int, largest: float) -> float:
    return row_exp_halves(row, count, np.float32(1.0), largest)  # type: ignore[no-any-return]


def test_powers_as_halves_in_the_first_half_of_their_row() -> None:
    scores = -normal(128).abs() * 5
    scores[:2] = torch.tensor([0.0, -torch.inf])
    wanted = scores.double().exp()
    total = exp_halves(scores.data_ptr(), 128, torch.zeros(()).numpy()[()])
    found = scores.view(torch.bfloat16)[:128]
    assert found[:2].tolist() == [1, 0]
    assert ((found - wanted).abs() <= wanted * 2**-8).all()
    assert total == pytest.approx(wanted.sum().item(), rel=1e-6)
