"""What a worker does while it loads: its record tells it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from kvproto.messages import Loading

COUNTED = ("kvcpu.vector.compiled", "kvgpu.triton_language")  # have lists of what this process compiled, once imported


class LoadProgress:
    """Written by the thread that loads, read by the event loop."""

    def __init__(self) -> None:
        self.doing = "starting"
        self._total_bytes = 0
        self._loaded: dict[tuple[int, str], Any] = {}  # parameters, by module and name

    def now(self) -> Loading:
        kernels = sum(len(sys.modules[name].compiled) for name in COUNTED if name in sys.modules)
        shared_once = {id(one): one.nbytes for one in list(self._loaded.values())}
        return Loading(self.doing, sum(shared_once.values()), self._total_bytes, kernels)

    @contextmanager
    def weights(self, total_bytes: int) -> Iterator[None]:
        """Counts parameters as transformers gives them their numbers. `total_bytes`: 0 if it is not known."""
        from torch.nn.modules.module import register_module_parameter_registration_hook

        def registered(module: Any, name: str, parameter: Any) -> None:
            if parameter is not None and not parameter.is_meta:
                self._loaded[id(module), name] = parameter

        self.doing, self._total_bytes = "loading weights", total_bytes
        counting = register_module_parameter_registration_hook(registered)
        try:
            yield
        finally:
            counting.remove()
            self._total_bytes, self._loaded = 0, {}


def numbers_in(checkpoint: Path) -> int:
    """How many numbers the safetensors files of the folder hold."""
    from safetensors import safe_open

    total = 0
    for path in checkpoint.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return total
