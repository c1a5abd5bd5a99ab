"""Compiles one kernel twice for a GPU that need not be there: `python -m` it, without Triton's interpreter. Prints what
was counted."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvgpu.triton_language import compiled, tl, triton


@triton.jit
def add(numbers, one: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(numbers, tl.load(numbers) + one)


if __name__ == "__main__":
    for _ in range(2):
        source = ASTSource(fn=add, signature={"numbers": "*fp32", "one": "constexpr"}, constexprs={(1,): 3})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(compiled)
