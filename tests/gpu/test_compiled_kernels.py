"""What Triton compiles is counted, for a GPU that need not be there, and what it finds compiled is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvgpu import triton_language
from kvgpu.triton_language import tl, triton


def add(numbers, one: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(numbers, tl.load(numbers) + one)


def test_a_kernel_counts_when_it_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = list(triton_language.compiled)
    for _ in range(2):
        source = ASTSource(
            fn=JITFunction(add), signature={"numbers": "*fp32", "one": "constexpr"}, constexprs={(1,): 3}
        )
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert triton_language.compiled == [*before, "add"]
