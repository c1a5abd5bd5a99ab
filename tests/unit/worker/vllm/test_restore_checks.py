"""Blocks that were computed again are compared as numbers of their type, by what rounding may do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfleet.worker.vllm.restore_checks import MOST_OPEN, RestoreChecks, SampledRestore


def block(values: torch.Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_no_difference_and_a_changed_number_is(dtype: torch.dtype) -> None:
    checks = RestoreChecks(str(dtype).removeprefix("torch."))
    values = torch.randn(512, generator=torch.Generator().manual_seed(0)).to(dtype)
    nearly = (values.float() * (1 + torch.finfo(dtype).eps)).to(dtype)
    wrong = values.clone()
    wrong[7] += wrong.abs().max()
    assert not checks.is_wrong(checks.difference(block(nearly), block(values)))
    assert checks.is_wrong(checks.difference(block(wrong), block(values)))
    expected = float((wrong.float() - values.float()).abs().max() / values.float().abs().max())
    assert np.isclose(checks.difference(block(wrong), block(values)), expected)


def test_what_is_no_number_is_wrong() -> None:
    checks = RestoreChecks("float32")
    zeros, nothing = memoryview(bytes(64)), memoryview(b"\xff" * 64)
    assert checks.is_wrong(checks.difference(nothing, zeros))
    assert not checks.is_wrong(checks.difference(zeros, zeros))


def test_one_restore_in_so_many_of_known_types() -> None:
    checks = RestoreChecks("bfloat16", sampled=4)
    assert [checks.is_due() for _ in range(8)] == [False, False, False, True] * 2
    assert not any(RestoreChecks("fp8_e4m3", sampled=1).is_due() for _ in range(8))


def test_what_is_never_computed_is_forgotten() -> None:
    checks = RestoreChecks("float32")
    for number in range(MOST_OPEN + 1):
        checks.expect(number.to_bytes(16), SampledRestore(b"r", b"f", "v"))
    assert checks.take(bytes(16)) is None
    assert checks.take((1).to_bytes(16)) == SampledRestore(b"r", b"f", "v")
    assert checks.take((1).to_bytes(16)) is None
