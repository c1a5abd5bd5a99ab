"""K and V of one layer as safetensors bytes, from torch tensors or numpy arrays."""

from __future__ import annotations

from typing import Any


def to_safetensors(k: Any, v: Any) -> bytes:
    """`{"k", "v"}`, each `[tokens, kv_heads, head_dim]`, in the pool's dtype."""
    if type(k).__module__.startswith("torch"):
        from safetensors.torch import save

        return bytes(save({"k": k.contiguous(), "v": v.contiguous()}))
    import numpy
    from safetensors.numpy import save as save_arrays

    return bytes(save_arrays({"k": numpy.ascontiguousarray(k), "v": numpy.ascontiguousarray(v)}))
