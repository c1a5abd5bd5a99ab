"""Compiles what the Triton attention would launch, for GPUs that need not be there: `python -m` it, without Triton's
interpreter. Prints a line for each kernel: what of, for which GPU, and the bytes of shared memory that it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kvcpu.blocks import AttentionForm, KvShape
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.schedule.step_plan import Slice
from kvgpu.attention import backend, kernels
from kvgpu.attention.plan import SHORTEST_PART

BF16 = torch.bfloat16
TYPES = {torch.float32: "*fp32", BF16: "*bf16", torch.int8: "*i8", torch.int32: "*i32"}
# Of one layer, with how many query heads: GPT-OSS, DeepSeek V3 in two kinds of numbers, DeepSeek V2 Lite, plain ones.
CASES = {
    "sinks": (KvShape(1, 8, 64, BF16), 64),
    "latents": (KvShape(1, 1, 576, BF16, latent=512), 128),
    "latents-int8": (KvShape(1, 1, 576, BF16, quantized=True, latent=512), 128),
    "latents-fp32": (KvShape(1, 1, 576, torch.float32, latent=512), 16),
    "plain-int8": (KvShape(1, 8, 128, BF16, quantized=True), 32),
}
STEPS = {"decodes": [(4 * SHORTEST_PART, 1)], "prompts": [(0, 70), (4 * SHORTEST_PART, 1)]}
ARCHITECTURES = (80, 90)


class Compiling:
    """In the place of a kernel: compiles it for what it is launched with, and runs nothing."""

    def __init__(self, kernel: Any, told: dict[str, Any]) -> None:
        self._kernel, self._told = kernel, told

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *given: Any, **named: Any) -> None:
        names = self._kernel.arg_names
        values = dict(zip(names, given, strict=False)) | {
            name: named.pop(name) for name in list(named) if name in names
        }
        fixed = {one.name for one in self._kernel.params if one.is_constexpr}
        signature = {name: "constexpr" if name in fixed else _type(values[name]) for name in names}
        source = ASTSource(self._kernel, signature, {name: values[name] for name in fixed})
        for architecture in ARCHITECTURES:
            made = compile(source, target=GPUTarget("cuda", architecture, 32), options=named)
            kernel = {"kernel": self._kernel.__name__, "sm": architecture, "shared": made.metadata.shared}
            print(json.dumps(self._told | kernel), flush=True)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def main() -> None:
    originals = {name: getattr(kernels, name) for name in ("store", "attend", "combine")}
    for name, (shape, heads) in CASES.items():
        for step, parts in STEPS.items():
            for kernel, original in originals.items():
                setattr(kernels, kernel, Compiling(original, {"case": name, "step": step}))
            blocks = [range(-(-(start + count) // 16)) for start, count in parts]
            slices = [Slice([0] * count, start, at, None) for (start, count), at in zip(parts, blocks, strict=True)]
            pool = KvPool(shape, max(len(at) for at in blocks), 16, torch.device("cpu"))
            tokens = sum(count for _, count in parts)
            query, key = (
                torch.zeros(tokens, count, shape.head_dim, dtype=shape.dtype) for count in (heads, shape.kv_heads)
            )
            form = (
                AttentionForm(0.1, 200, None, torch.zeros(heads))
                if name == "sinks"
                else AttentionForm(0.1, softcap=2.0)
            )
            attending = backend.TritonBackend(torch.device("cpu")).prepare(RaggedBatch.of(slices, 16), pool)
            attending.attend(0, query, key, key[..., : shape.value_dim], form)


if __name__ == "__main__":
    backend.INTERPRETED = False  # a GPU multiplies bfloat16
    main()
