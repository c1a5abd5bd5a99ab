"""What the benchmarks of a GPU share: a model of a known shape with random weights, and times of a device's work."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness.gpu import shape_folder
from benchmarks.harness.report import finish, parser, skip

BLOCK = 16


def begin(name: str, unit: str, *, floor: float, peer: str, doc: str | None) -> Namespace:
    """Its command line. Exits as skipped without a GPU, unless `--dry`."""
    made = parser(doc)
    made.add_argument("--dry", action="store_true", help="tiny, on a CPU, with interpreted kernels: no figure")
    asked = made.parse_args()
    if asked.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        skip(name, unit, floor=floor, peer=peer, why="torch sees no GPU")
    return asked


@dataclass(frozen=True, slots=True)
class Bench:
    """A runner of the shape, on the device. `linear`: parameters of its products, without embeddings and head."""

    runner: Any
    config: Any
    device: torch.device
    linear: int
    head: int
    number_bytes: int

    @property
    def kv_token_bytes(self) -> int:
        return int(self.runner.bytes_per_block // self.runner.block_size)

    def slices(self, start: int, tokens: int, draws: Sequence[Any]) -> list[Any]:
        """A sequence for each draw, in blocks of its own."""
        from kvfleet.worker.schedule.step_plan import Slice

        each = -(-(start + tokens) // BLOCK)
        ids = [at % 500 for at in range(tokens)]
        return [Slice(ids, start, range(at * each, (at + 1) * each), draw) for at, draw in enumerate(draws)]

    def seconds(self, work: Callable[[], object], rounds: int) -> float:
        """Median of some rounds after a first one, to the last kernel's end."""
        taken = []
        for _ in range(rounds + 1):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def load(blocks: int, *, dry: bool, graphs: int = 0) -> Bench:
    """bf16 on the GPU; dry, float32 on the CPU. Decode steps of up to `graphs` sequences are recorded."""
    from kvfleet.worker.model.assembly import build_runner
    from kvfleet.worker.model.loader import load_model

    with TemporaryDirectory() as folder:
        loaded = load_model(
            shape_folder(folder, dry=dry),
            load_format="dummy",
            dtype="float32" if dry else "bfloat16",
            device="cpu" if dry else "cuda",
        )
    runner = build_runner(loaded, blocks, BLOCK, "triton", graphs)
    head = loaded.model.get_output_embeddings().weight.numel()
    embedded = loaded.model.get_input_embeddings().weight.numel()
    whole = sum(one.numel() for one in loaded.model.parameters())
    return Bench(runner, loaded.config, loaded.device, whole - head - embedded, head, loaded.kv_shape.dtype.itemsize)


def copy_rate(bench: Bench, nbytes: int, rounds: int) -> float:
    """Bytes/s read and written by a copy within the device's memory."""
    one, other = (torch.ones(nbytes // 2, dtype=torch.uint8, device=bench.device) for _ in range(2))
    return nbytes / bench.seconds(lambda: other.copy_(one), rounds)


def product_rate(bench: Bench, size: int, rounds: int) -> float:
    """FLOP/s of one large product in the model's numbers."""
    dtype = next(bench.runner._model.parameters()).dtype
    one, other = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
    return 2 * size**3 / bench.seconds(lambda: one @ other, rounds)


def end(
    asked: Namespace, name: str, value: float, unit: str, *, floor: float, ok: bool, peer: str, **told: Any
) -> None:
    """Of a dry run no figure."""
    if asked.dry:
        skip(name, unit, floor=floor, peer=peer, why="a dry run came to its end")
    finish(name, round(value, 3), unit, floor=floor, peer=peer, ok=ok, gpu=torch.cuda.get_device_name(), **told)
