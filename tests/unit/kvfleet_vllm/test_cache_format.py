"""Formats differ where bytes may mean something else, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfleet_vllm.cache_format import cache_format


def config(**changed: Any) -> Any:
    facts = {
        "dtype": torch.bfloat16, "quantization": None, "cache_dtype": "auto", "block_size": 32, "ranks": 1, "layers": 4,
        "path": "/models/m", **changed,
    }  # fmt: skip
    hf = {"num_hidden_layers": facts["layers"], "_name_or_path": facts["path"], "rope": {"theta": 1.0}}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=facts["dtype"], quantization=facts["quantization"], hf_config=SimpleNamespace(to_dict=lambda: hf)
        ),
        cache_config=SimpleNamespace(cache_dtype=facts["cache_dtype"], block_size=facts["block_size"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=facts["ranks"], pipeline_parallel_size=1),
    )


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"a": torch.zeros(*shape, dtype=dtype), "b": torch.zeros(*shape, dtype=dtype)}


BACKENDS = {"a": "CPU_ATTN vec", "b": "CPU_ATTN vec"}
ONE = cache_format("0.32.0", config(), tensors(6, 2, 32, 8), BACKENDS)


def test_the_same_vllm_elsewhere_has_the_same_format() -> None:
    assert len(ONE) == 16
    assert cache_format("0.32.0", config(path="/other"), tensors(9, 2, 32, 8), dict(reversed(BACKENDS.items()))) == ONE


@pytest.mark.parametrize(
    "changed",
    [{"dtype": torch.float16}, {"quantization": "fp8"}, {"cache_dtype": "fp8"}, {"block_size": 64}, {"ranks": 2},
     {"layers": 5}],
)  # fmt: skip
def test_another_configuration_is_another_format(changed: Any) -> None:
    assert cache_format("0.32.0", config(**changed), tensors(6, 2, 32, 8), BACKENDS) != ONE


@pytest.mark.parametrize(
    ("version", "cache", "backends"),
    [
        ("0.33.0", tensors(6, 2, 32, 8), BACKENDS),
        ("0.32.0", tensors(6, 32, 2, 8), BACKENDS),
        ("0.32.0", tensors(6, 2, 32, 8, dtype=torch.float16), BACKENDS),
        ("0.32.0", {"a": torch.zeros(6, 2, 32, 8)}, BACKENDS),
        ("0.32.0", {name: torch.zeros(6, 32, 2, 8).transpose(1, 2) for name in "ab"}, BACKENDS),
        ("0.32.0", tensors(6, 2, 32, 8), {**BACKENDS, "b": "CPU_ATTN amx"}),
    ],
)
def test_another_layout_is_another_format(version: str, cache: dict[str, Tensor], backends: dict[str, str]) -> None:
    assert cache_format(version, config(), cache, backends) != ONE


def test_which_group_lies_where_is_a_part_of_it_if_there_are_several() -> None:
    parts = [[[0], [1], [["a"], ["b"]]], [[1], [0], [["a"], ["b"]]], [[0], [1], [["b"], ["a"]]]]
    assert len({ONE, *(cache_format("0.32.0", config(), tensors(6, 2, 32, 8), BACKENDS, one) for one in parts)}) == 4
