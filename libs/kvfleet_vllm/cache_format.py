"""What decides the meaning of the bytes in vLLM's blocks. Imports nothing of vLLM.

Blocks of one format are good in every vLLM that has it, so what may matter is in it: another layout in the same size
would be read as wrong text.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

_OF_FILES = ("_name_or_path", "transformers_version", "_commit_hash")


def cache_format(
    version: str, config: Any, caches: Mapping[str, Tensor], backends: Mapping[str, str], groups: Sequence[Any] = ()
) -> bytes:
    """`backends` tells how each layer's attention lays out what it caches, `groups` which layers have their blocks in
    which part of a slot, if there are several. Raises TypeError, AttributeError for a vLLM that it does not know."""
    model = config.model_config
    on_cpu = all(tensor.device.type == "cpu" for tensor in caches.values())
    meaning = [
        version,
        _of_model(model.hf_config),
        [str(model.dtype), str(model.quantization), str(config.cache_config.cache_dtype)],
        [config.cache_config.block_size, config.parallel_config.tensor_parallel_size],
        [[name, _layout(tensor), backends.get(name)] for name, tensor in sorted(caches.items())],
        [platform.machine(), torch.backends.cpu.get_cpu_capability()] if on_cpu else ["gpu"],
        *groups,
    ]
    return blake2b(json.dumps(meaning, sort_keys=True, default=str).encode(), digest_size=16).digest()


def _of_model(hf_config: Any) -> dict[str, Any]:
    return {name: value for name, value in hf_config.to_dict().items() if name not in _OF_FILES}


def _layout(tensor: Tensor) -> list[Any]:
    """All but how many blocks there are, which strides tell too where layers or blocks are not outermost."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return [list(tensor.shape[1:]), order, str(tensor.dtype)]
