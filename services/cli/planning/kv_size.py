"""`kvfleet kv-size`: the memory that a model's keys and values take, as the worker's own code computes it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from kvfleet.cli.console import fail, figures, out
from kvfleet.cli.embedded.up import Device, DType
from kvservice import launch
from kvservice.byte_size import parse_bytes, readable


class KvDType(StrEnum):  # typer takes no list of literals
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


def known_size(param: typer.CallbackParam, text: str | None) -> str | None:
    """An option's callback: fails for a text that is no size."""
    if text is not None:
        try:
            parse_bytes(text)
        except ValueError as error:
            fail(f"--{(param.name or '').replace('_', '-')}: {error}", 2)
    return text


def kv_size(
    model: Annotated[str, typer.Argument(help="demo, a model folder or a hub id; only its config.json is read")],
    block_size: Annotated[int, typer.Option(min=1, max=256, help="tokens in a block")] = 16,
    kv_dtype: Annotated[list[KvDType] | None, typer.Option(help="only this one; may be repeated")] = None,
    dtype: Annotated[DType, typer.Option(help="what `auto` is")] = "auto",
    device: Annotated[Device, typer.Option(help="whose free memory counts")] = "auto",
    memory: Annotated[
        str | None, typer.Option(help="such as 8GiB; default: what a worker would take here", callback=known_size)
    ] = None,
    kv_memory_fraction: Annotated[
        float | None, typer.Option(min=0.01, max=0.95, help="share of the free memory; default: 0.3, on a GPU 0.9")
    ] = None,
    workers_on_host: Annotated[int, typer.Option(min=1, help="how many workers share it")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON instead of a table")] = False,
) -> None:
    """How much memory keys and values take: per token, per sequence, and how many sequences fit."""
    flags = [f"--block-size={block_size}", f"--dtype={dtype}", f"--device={device}"]
    flags.append(f"--workers-on-host={workers_on_host}")
    flags += [] if kv_memory_fraction is None else [f"--kv-memory-fraction={kv_memory_fraction}"]
    flags += [f"--kv-dtype={one}" for one in kv_dtype or []]
    flags += [] if memory is None else [f"--memory={memory}"]
    said = report(model, flags)
    if as_json:
        typer.echo(said, nl=False)
        return
    found = json.loads(said)
    window = f", window {found['window']:,}" if found["window"] else ""
    line = f"{found['model']}: {found['formula']} a token ({found['auto']}), context {found['context_length']:,}"
    out.print(line + window)
    if found["state_bytes"]:
        out.print(f"recurrent state of a sequence, and of each snapshot: {readable(found['state_bytes'])}")
    out.print(_table(found))


def report(model: str, flags: Sequence[str]) -> str:
    """The JSON that the worker's code prints, in a process of its own. Exits with its code if it fails."""
    command = launch.command("kvfleet.worker.model.kv_size_report", *flags, "--", model)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise typer.Exit(done.returncode)
    return done.stdout


def _table(found: dict[str, Any]) -> Table:
    sizes = found["sizes"]
    kinds = [size["kv_dtype"] + (" (auto)" if size["kv_dtype"] == found["auto"] else "") for size in sizes]
    table = figures(out, "", *kinds, pad_edge=True)
    table.add_row("a token", *(readable(size["bytes_per_token"]) for size in sizes))
    table.add_row(f"a block of {found['block_size']}", *(readable(size["bytes_per_block"]) for size in sizes))
    sequences = list(zip(*(size["sequences"] for size in sizes), strict=True))
    for each in sequences:
        table.add_row(f"a sequence of {each[0]['tokens']:,}", *(readable(one["bytes"]) for one in each))
    free = "" if found["free"] is None else f" ({found['memory'] / found['free']:.0%} of what is free)"
    table.add_row(f"in {readable(found['memory'])}{free}:", *("" for _ in sizes))
    table.add_row("blocks", *(f"{size['blocks']:,}" for size in sizes))
    for each in sequences:
        table.add_row(f"sequences of {each[0]['tokens']:,}", *(f"{one['fit']:,}" for one in each))
    return table
