"""Wiring of `kvfleet kv-size`: a model's configuration and this machine's free memory in, one line of JSON out."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from kvfleet.worker.model.kv_size import NUMBER_BYTES, columns, formula, kv_size
from kvfleet.worker.model.model_folder import local_folder
from kvfleet.worker.settings import WorkerSettings
from kvproto.errors import KvfleetError
from kvservice.byte_size import parse_bytes
from kvservice.settings import die


def report(asked: argparse.Namespace) -> dict[str, Any]:
    """The sizes as plain values. Raises KvfleetError, in one line that says what is wrong."""
    # Here, so that --help and a wrong flag are answered at once.
    from kvfleet.worker.model.kv_pool import free_bytes, share_of_free
    from kvfleet.worker.model.loader import device_of, dtype_of, read_config
    from kvfleet.worker.model.probe import layout_of
    from kvfleet.worker.model.support import supported_context

    config = read_config(local_folder(asked.model) or asked.model, wanted="configuration can be read")
    layout = layout_of(config, supported_context(config))
    device = device_of(asked.device)
    free = free_bytes(device)
    share = share_of_free(asked.kv_memory_fraction, device, asked.workers_on_host)
    memory = int(free * share) if asked.memory is None else asked.memory
    auto = str(dtype_of(asked.dtype, config, device)).removeprefix("torch.")
    return {
        "model": asked.model,
        **asdict(layout),
        "block_size": asked.block_size,
        "auto": auto,
        "formula": formula(layout, auto),
        "memory": memory,
        "free": free if asked.memory is None else None,  # what `memory` is a share of
        "sizes": [asdict(kv_size(layout, asked.block_size, one, memory)) for one in columns(auto, asked.kv_dtype)],
    }


def _flags() -> argparse.ArgumentParser:
    defaults = WorkerSettings.model_fields
    flags = argparse.ArgumentParser("kvfleet kv-size")
    flags.add_argument("model")
    flags.add_argument("--block-size", type=int, default=defaults["block_size"].default)
    flags.add_argument("--kv-dtype", action="append", default=[], choices=["auto", *NUMBER_BYTES])
    flags.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    flags.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    flags.add_argument("--memory", type=_bytes)
    flags.add_argument("--kv-memory-fraction", type=float, default=defaults["kv_memory_fraction"].default)
    flags.add_argument("--workers-on-host", type=int, default=1)
    return flags


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: list[str] | None = None) -> None:
    asked = _flags().parse_args(argv)
    try:
        found = report(asked)
    except KvfleetError as error:
        die(f"kvfleet kv-size: {error}")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
