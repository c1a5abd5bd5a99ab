"""Vector code against numpy and torch in fp64: e**x, caps, activations, conversions, sums, products, memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray

from kvcpu.vector import conversion
from kvcpu.vector import memory as memory_module
from kvcpu.vector.cells import copy_bytes, read_float, read_int, row_fill, take_ticket, write_byte, write_float
from kvcpu.vector.conversion import narrow, widen
from kvcpu.vector.memory import HUGE_PAGE, PagesAhead, huge_pages
from kvcpu.vector.products import dots, pair_product, product, transpose
from kvcpu.vector.rows import (
    row_act,
    row_affine,
    row_cap,
    row_exp,
    row_gate,
    row_max,
    row_rotate,
    row_scale,
    row_spread,
    row_sum,
)

Floats = NDArray[np.float32]
NAN, INF = float("nan"), float("inf")
FLOAT32, BFLOAT16, FLOAT16, INT8 = range(4)


def at(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def floats(*numbers: float) -> Floats:
    """Filled up with zeros to whole vectors."""
    return np.array([*numbers, *[0.0] * (-len(numbers) % 16)], dtype=np.float32)


def normal(*shape: int) -> Floats:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------------------------------------- e**x and activations


@njit  # type: ignore[untyped-decorator]
def exp_of(row: int, count: int, largest: float) -> float:
    return row_exp(row, count, np.float32(1.0), largest)  # type: ignore[no-any-return]


def exp(x: Floats, largest: float = 0.0) -> tuple[Floats, float]:
    powers = x.copy()
    return powers, float(exp_of(at(powers), len(powers), np.float32(largest)))


def test_exp_is_right_to_a_few_units_in_the_last_place() -> None:
    x = np.linspace(-87, 0, 2**18, dtype=np.float32)
    powers, total = exp(x)
    wanted = np.exp(x.astype(np.float64))
    assert np.abs(powers / wanted - 1).max() < 2e-7
    assert total == pytest.approx(wanted.sum(), rel=1e-6)
    assert powers[-1] == 1


def test_exp_far_below_zero_is_nothing() -> None:
    powers, _ = exp(np.linspace(-100, -87, 2**12, dtype=np.float32))
    assert (powers >= 0).all()
    assert powers.max() < 1.7e-38
    assert (exp(floats(-88, -1e4, -3e38, -INF))[0][:4] == 0).all()


def test_exp_is_of_the_distance_to_the_largest() -> None:
    powers, total = exp(floats(*[5000.0] * 8, *[4999.0] * 8), 5000.0)
    assert (powers[:8] == 1).all()
    assert powers[8:] == pytest.approx(np.exp(-1))
    assert total == pytest.approx(8 + 8 * np.exp(-1))


def test_exp_of_nan_is_nan_and_its_neighbours_are_not() -> None:
    powers, total = exp(floats(0, NAN, -1))
    assert np.isnan(total)
    assert np.isnan(powers).tolist() == [False, True] + [False] * 14


@njit  # type: ignore[untyped-decorator]
def cap_row(row: int, count: int, cap: float) -> None:
    row_cap(row, count, cap)


@pytest.mark.parametrize("cap", [0.5, 4.0, 30.0, 50.0])
def test_cap_is_that_of_the_tangent(cap: float) -> None:
    x = np.linspace(-6 * cap, 6 * cap, 2**12, dtype=np.float32)
    capped = x.copy()
    cap_row(at(capped), len(capped), np.float32(cap))
    assert np.abs(capped - cap * np.tanh(x.astype(np.float64) / cap)).max() < 3e-7 * cap
    assert np.array_equal(capped, -capped[::-1])


def test_cap_of_what_is_no_number() -> None:
    capped = floats(INF, -INF, 3e38, -3e38, NAN, 0.0)
    cap_row(at(capped), len(capped), np.float32(30.0))
    assert capped[:4].tolist() == [30, -30, 30, -30]
    assert np.isnan(capped[4])
    assert capped[5] == 0


@njit  # type: ignore[untyped-decorator]
def gate_row(gates: int, ups: int, count: int, tanh: bool) -> None:
    if tanh:
        row_gate(gates, ups, count, 1)
    else:
        row_gate(gates, ups, count, 0)


@njit  # type: ignore[untyped-decorator]
def act_row(row: int, count: int, tanh: bool) -> None:
    if tanh:
        row_act(row, count, 1)
    else:
        row_act(row, count, 0)


def gated(x: Floats, tanh: bool) -> Floats:
    """By both kernels, which must agree."""
    out, ones, alone = x.copy(), np.ones_like(x), x.copy()
    gate_row(at(out), at(ones), len(out), tanh)
    act_row(at(alone), len(alone), tanh)
    assert np.array_equal(out, alone, equal_nan=True)
    return out


ACTS: dict[bool, Callable[[torch.Tensor], torch.Tensor]] = {
    False: torch.nn.functional.silu,
    True: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("tanh", ACTS, ids=["silu", "tanh"])
def test_activations(tanh: bool) -> None:
    x = np.concatenate([np.linspace(-30, 30, 2**14, dtype=np.float32), floats(-1e4, 1e4, -1e9, 1e9, 1e-30, -0.0)])
    wanted = ACTS[tanh](torch.from_numpy(x).double()).numpy()
    assert (np.abs(gated(x, tanh) - wanted) <= 1e-6 * np.abs(wanted) + 4e-7).all()
    assert np.isnan(gated(floats(NAN), tanh)[0])


@pytest.mark.parametrize(
    "tanh",
    [
        False,
        True,
    ],
    ids=["silu", "tanh"],
)
def test_activations_of_numbers_whose_square_overflows(tanh: bool) -> None:
    found = gated(floats(2e19, -2e19, 3e38, INF), tanh)
    assert found[:4].tolist() == [np.float32(2e19), 0, np.float32(3e38), INF]


def test_the_gate_multiplies_the_other_row() -> None:
    gates, ups = normal(32), normal(2, 32)[1].copy()
    wanted = torch.nn.functional.silu(torch.from_numpy(gates)).numpy() * ups
    gate_row(at(gates), at(ups), 32, False)
    assert gates == pytest.approx(wanted, abs=1e-6)


# ---------------------------------------------------------------------------------------------- stored numbers


@njit  # type: ignore[untyped-decorator]
def widen_row(kind: int, source: int, target: int, count: int, factor: float) -> None:
    if kind == 0:
        widen(0, source, target, count, factor)
    elif kind == 1:
        widen(1, source, target, count, factor)
    elif kind == 2:
        widen(2, source, target, count, factor)
    else:
        widen(3, source, target, count, factor)


@njit  # type: ignore[untyped-decorator]
def narrow_row(kind: int, source: int, target: int, count: int, factor: float) -> None:
    if kind == 0:
        narrow(0, source, target, count, factor)
    elif kind == 1:
        narrow(1, source, target, count, factor)
    else:
        narrow(2, source, target, count, factor)


def widened(kind: int, stored: NDArray[Any], count: int, factor: float = 1.0) -> Floats:
    out = np.full(count + 1, -7.0, dtype=np.float32)
    widen_row(kind, at(stored), at(out), count, np.float32(factor))
    assert out[count] == -7, "wrote past the end"
    return out[:count]


def narrowed(kind: int, x: Floats, factor: float = 1.0) -> NDArray[np.uint16]:
    out = np.full(len(x) + 1, 0x1234, dtype=np.uint16)
    narrow_row(kind, at(x), at(out), len(x), np.float32(factor))
    assert out[-1] == 0x1234, "wrote past the end"
    return out[:-1]


@pytest.mark.parametrize(("kind", "dtype"), [(BFLOAT16, torch.bfloat16), (FLOAT16, torch.float16)])
def test_every_half_is_widened_to_what_torch_makes_of_it_and_back(kind: int, dtype: torch.dtype) -> None:
    stored = np.arange(2**16, dtype=np.uint16)
    wanted = torch.from_numpy(stored.view(np.int16)).view(dtype).float().numpy()
    found = widened(kind, stored, len(stored))
    assert np.array_equal(found, wanted, equal_nan=True)
    back, numbers = narrowed(kind, found), ~np.isnan(wanted)
    assert np.array_equal(back[numbers], stored[numbers])
    again = torch.from_numpy(back.view(np.int16)).view(dtype)
    assert again[torch.from_numpy(~numbers)].isnan().all()


@pytest.mark.parametrize(("kind", "dtype"), [(BFLOAT16, torch.bfloat16), (FLOAT16, torch.float16)])
def test_rounding_is_to_nearest_and_ties_go_to_even(kind: int, dtype: torch.dtype) -> None:
    halves = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(dtype).float().numpy()
    halves = np.sort(halves[np.isfinite(halves)])
    with np.errstate(over="ignore"):
        ties = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32)
        x = np.concatenate([ties, np.nextafter(ties, np.float32(INF)), np.nextafter(ties, np.float32(-INF))])
    x = np.concatenate([x, floats(INF, -INF, 3.4e38, -3.4e38, 65519, 65520, 1e-45, 0.0, -0.0), normal(1000)])
    wanted = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(narrowed(kind, x), wanted)


def test_nan_stays_nan_whatever_its_bits_are() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000] * 4, dtype=np.uint32)
    for kind, dtype in ((BFLOAT16, torch.bfloat16), (FLOAT16, torch.float16)):
        stored = narrowed(kind, bits.view(np.float32))
        assert torch.from_numpy(stored.view(np.int16)).view(dtype).isnan().all()


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 32, 33])
def test_conversions_of_any_length_stop_at_their_end(count: int) -> None:
    """With a factor each; the rest behind whole vectors goes by single numbers."""
    x = normal(count)
    for kind, dtype in ((BFLOAT16, torch.bfloat16), (FLOAT16, torch.float16)):
        wanted = (torch.from_numpy(x) * 0.75).to(dtype)
        stored = narrowed(kind, x, 0.75)
        assert np.array_equal(stored, wanted.view(torch.int16).numpy().view(np.uint16))
        assert np.array_equal(widened(kind, stored, count, 3.0), (wanted.float() * 3).numpy())
    assert np.array_equal(widened(FLOAT32, x, count, 0.5), x / 2)
    copied = np.full(count + 1, -7.0, dtype=np.float32)
    narrow_row(FLOAT32, at(x), at(copied), count, np.float32(2.0))
    assert np.array_equal(copied, np.append(2 * x, np.float32(-7)))


def test_bytes_are_signed() -> None:
    stored = np.arange(-128, 128, dtype=np.int8)
    assert np.array_equal(widened(INT8, stored, 255, 0.5), stored[:255].astype(np.float32) / 2)


# ---------------------------------------------------------------------------------------------- rows and products


@njit  # type: ignore[untyped-decorator]
def statistics_of(row: int, count: int, mean: float) -> tuple[float, float, float]:
    return row_max(row, count), row_sum(row, count), row_spread(row, count, mean)


def test_maximum_sum_and_spread() -> None:
    x = normal(160)
    largest, total, spread = statistics_of(at(x), len(x), np.float32(0.25))
    assert largest == x.max()
    assert total == pytest.approx(x.astype(np.float64).sum(), abs=1e-5)
    assert spread == pytest.approx(((x.astype(np.float64) - 0.25) ** 2).sum(), rel=1e-6)
    assert statistics_of(at(np.full(16, -INF, dtype=np.float32)), 16, np.float32(0.0))[0] == -INF


@njit  # type: ignore[untyped-decorator]
def change_rows(row: int, weights: int, biases: int, rotated: int, cosines: int, sines: int, filled: int) -> None:
    row_scale(row, 32, np.float32(2.0))
    row_affine(row, 32, np.float32(0.5), np.float32(3.0), weights, biases)
    row_rotate(rotated, cosines, sines, 32)
    row_fill(filled, 5, np.float32(9.0))


def test_rows_are_changed_in_place() -> None:
    row, weights, biases = (part.copy() for part in normal(3, 32))
    turned, angles = (part.copy() for part in normal(2, 64))
    cosines, sines, filled = np.cos(angles), np.sin(angles), normal(16)
    affine = (2 * row - 0.5) * 3 * weights + biases
    first, second = turned[:32].copy(), turned[32:].copy()
    rotated = np.concatenate([first * cosines[:32] - second * sines[:32], second * cosines[32:] + first * sines[32:]])
    rest = filled[5:].copy()
    change_rows(at(row), at(weights), at(biases), at(turned), at(cosines), at(sines), at(filled))
    assert row == pytest.approx(affine, abs=1e-5)
    assert turned == pytest.approx(rotated, abs=1e-6)
    assert filled.tolist() == [9.0] * 5 + rest.tolist()


@njit  # type: ignore[untyped-decorator]
def multiply(left: int, right: int, depth: int, scores: int, sums: int, turned: int) -> None:
    product(4, 2, left, 4 * depth, right, 128, depth, sums, 128, 0)
    product(1, 2, left, 4 * depth, right, 128, depth, sums + 512, 128, 1)
    dots(left, left, 4 * depth, depth, scores)
    transpose(left, 4 * depth, turned, 64, depth)


def test_products_and_transposition() -> None:
    depth = 48
    left, right, sums = normal(16, depth), normal(depth, 32), np.ones((5, 32), dtype=np.float32)
    scores, turned = np.empty(16, dtype=np.float32), np.empty((depth, 16), dtype=np.float32)
    multiply(at(left), at(right), depth, at(scores), at(sums), at(turned))
    assert sums[:4] == pytest.approx(left[:4] @ right + 1, abs=1e-5), "added to what was there"
    assert sums[4] == pytest.approx(left[0] @ right, abs=1e-5), "overwritten"
    assert scores == pytest.approx(left @ left[0], abs=1e-5)
    assert np.array_equal(turned, left.T)


@pytest.mark.parametrize("native", [True, False], ids=["instruction", "portable"])
def test_products_of_pairs(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and not conversion.multiplies_pairs():
        pytest.skip("this processor does not multiply bfloat16 by itself")
    monkeypatch.setattr(conversion, "multiplies_pairs", lambda: native)

    @njit  # type: ignore[untyped-decorator]
    def multiply_pairs(left: int, right: int, sums: int) -> None:
        pair_product(4, 1, left, 40, right, 64, 10, sums, 64, 0)
        pair_product(1, 1, left, 40, right, 64, 10, sums + 256, 64, 1)

    left = torch.randn(4, 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    right = torch.randn(10, 16, 2, generator=torch.Generator().manual_seed(2)).bfloat16()
    sums = torch.ones(5, 16)
    multiply_pairs(left.data_ptr(), right.data_ptr(), sums.data_ptr())
    wanted = left.double() @ right.double().transpose(1, 2).reshape(20, 16)
    assert (sums[:4] - 1 - wanted).abs().max() < 1e-5
    assert (sums[4] - wanted[0]).abs().max() < 1e-5
    assembly = "".join(multiply_pairs.inspect_asm().values())
    assert ("vdpbf16ps" in assembly) is native


@njit  # type: ignore[untyped-decorator]
def use_cells(numbers: int, integers: int, small: int) -> tuple[float, int, int, int]:
    write_float(numbers, np.float32(2.5))
    copy_bytes(numbers, numbers + 4, 4)
    write_byte(small, np.int32(-3))
    first = take_ticket(integers)
    return read_float(numbers + 4), first, take_ticket(integers), read_int(integers)


def test_cells() -> None:
    numbers, integers, small = floats(1, 1, 7), np.array([40]), np.array([1, 2], dtype=np.int8)
    assert use_cells(at(numbers), at(integers), at(small)) == (2.5, 40, 41, 42)
    assert numbers[:3].tolist() == [2.5, 2.5, 7.0]
    assert small.tolist() == [-3, 2]


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("size", [0, 1, 4096, HUGE_PAGE, HUGE_PAGE + 12])
def test_huge_pages_are_zero_aligned_and_as_large_as_asked(size: int) -> None:
    memory = huge_pages(size)
    assert memory.shape == (size,)
    assert memory.dtype is torch.uint8
    assert not memory.any()
    assert not size or memory.data_ptr() % HUGE_PAGE == 0
    memory.fill_(255)


def test_memory_that_is_not_there_is_refused() -> None:
    for size in (2**60, 2**70):
        with pytest.raises(MemoryError, match=str(size)):
            huge_pages(size)


def resident(memory: torch.Tensor) -> int:
    """Bytes of it that the process has taken from the system."""
    pages = -(-memory.nbytes // 4096)
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), present) == 0
    return 4096 * sum(one & 1 for one in present)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")
def test_pages_are_taken_ahead_of_their_use_and_not_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "LEAST_AHEAD", 4 * HUGE_PAGE)
    monkeypatch.setattr(memory_module, "MOST_AHEAD", 8 * HUGE_PAGE)
    memory = huge_pages(40 * HUGE_PAGE)
    pages = PagesAhead(memory)
    assert resident(memory) == 0
    for used, wanted in ((0, 4), (2, 4), (3, 7), (5, 10), (20, 28), (39, 40), (2, 40)):
        if taking := pages.reach(used * HUGE_PAGE):
            taking.result()
        assert resident(memory) == wanted * HUGE_PAGE
    assert not memory.any()


def test_where_pages_cannot_be_asked_for_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = huge_pages(3 * HUGE_PAGE)
    pages = PagesAhead(memory)
    monkeypatch.setattr(pages, "_madvise", lambda *_: -1)
    taking = pages.reach(100)
    assert taking is not None
    taking.result()
    monkeypatch.setattr(pages, "_madvise", None)
    pages.reach(2 * HUGE_PAGE)
    memory.fill_(1)
    assert memory.all()
