"""`kvfleet plan`: the workers, KV memory and vaults that a load needs, and their cost. Rates are measured or given."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich import box
from rich.table import Table

from kvfleet.cli.clients.generate import Key, known_url
from kvfleet.cli.console import err, fail, out, printable
from kvfleet.cli.embedded.up import DType
from kvfleet.cli.planning import planning
from kvfleet.cli.planning.kv_size import KvDType, known_size, report
from kvfleet.cli.planning.plan_rates import Measured, NoRates, how_to_measure, of_file, of_fleet
from kvservice.byte_size import parse_bytes, readable


def plan(
    model: Annotated[str, typer.Argument(help="demo, a model folder or a hub id; only its config.json is read")],
    requests_per_second: Annotated[float, typer.Option(min=1e-9, help="that come, in the mean")],
    ttft: Annotated[float, typer.Option(min=1e-9, help="seconds within which first tokens are to come")],
    ttft_share: Annotated[float, typer.Option(min=0.5, max=0.999, help="of them")] = 0.95,
    itl_ms: Annotated[float | None, typer.Option(min=0.001, help="between tokens of a stream, at most")] = None,
    input_tokens: Annotated[float, typer.Option(min=1, help="of a prompt, in the mean")] = 1000,
    input_cv: Annotated[float, typer.Option(min=0, max=10, help="standard deviation of that over its mean")] = 1.0,
    output_tokens: Annotated[float, typer.Option(min=1, help="generated, in the mean")] = 200,
    hit_rate: Annotated[
        float | None,
        typer.Option(min=0, max=0.999, help="share of prompt tokens found in a cache; default: measured, or 0"),
    ] = None,
    engine: Annotated[
        Literal["own", "vllm"], typer.Option(help="of the workers; vllm: says what flags vLLM needs, too")
    ] = "own",
    dtype: Annotated[DType, typer.Option(help="of the model")] = "auto",
    kv_dtype: Annotated[KvDType, typer.Option(help="of keys and values")] = KvDType.auto,
    worker_memory: Annotated[
        str | None, typer.Option(help="of a worker for keys and values, such as 24GiB", callback=known_size)
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="of a worker, instead: vLLM logs its KV cache size in tokens")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="sequences of a worker; default: measured, or 256")] = None,
    prefill_tokens_per_s: Annotated[float | None, typer.Option(min=1e-9, help="of one worker")] = None,
    decode_ms: Annotated[float | None, typer.Option(min=1e-6, help="a decode step")] = None,
    decode_each_ms: Annotated[float, typer.Option(min=0, help="more for each sequence in it")] = 0.0,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="of prompts in one step")] = 2048,
    rates: Annotated[Path | None, typer.Option(help="JSON: a saved GET /workers, or one worker's rates")] = None,
    from_fleet: Annotated[
        str | None,
        typer.Option(metavar="URL", help="an ingress: rates as its workers measured", callback=known_url),
    ] = None,
    api_key: Key = None,
    model_name: Annotated[str | None, typer.Option(help="as that fleet serves it, if it serves several")] = None,
    vault_minutes: Annotated[float, typer.Option(min=0, help="for so long vaults keep what was computed")] = 30.0,
    vault_memory: Annotated[str, typer.Option(help="of one vault for blocks", callback=known_size)] = "64GiB",
    price_per_worker_hour: Annotated[float | None, typer.Option(min=0)] = None,
    price_per_vault_hour: Annotated[float, typer.Option(min=0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON instead of a table")] = False,
) -> None:
    """How many workers, how much memory for keys and values, and what it costs, for a load and a wait."""
    if worker_memory is not None and kv_tokens is not None:
        fail("--worker-memory and --kv-tokens: one of them", 2)
    if engine == "vllm" and kv_dtype is KvDType.int8:
        fail("--kv-dtype int8 is the own engine's", 2)
    try:
        measured = _measured(rates, from_fleet, model_name, api_key, engine)
    except NoRates as error:
        fail(str(error))
    prefill, decode_s = prefill_tokens_per_s or measured.prefill_tokens_per_s, measured.decode_s
    decode_s = decode_ms / 1e3 if decode_ms is not None else decode_s
    if prefill is None or decode_s is None:
        missing = " and ".join(n for n, v in (("prefill", prefill), ("decoding", decode_s)) if v is None)
        why = (
            f"{measured.source}: {missing} is not measured yet"
            if measured.source
            else f"how fast a worker is with {model} is not known"
        )
        load = f"--requests-per-second {requests_per_second:g} --ttft {ttft:g}"
        load += f" --input-tokens {input_tokens:g} --output-tokens {output_tokens:g}"
        _measure_first(why, how_to_measure(model, load, input_tokens, output_tokens, from_fleet, engine))
    flags = [f"--kv-dtype={kv_dtype}", f"--dtype={dtype}", "--device=cpu"]
    reported = json.loads(report(model, [*flags, f"--memory={worker_memory or '1GiB'}"]))
    size, context = reported["sizes"][0], reported["context_length"]
    token_bytes = size["bytes_per_token"]
    held = measured.kv_tokens if worker_memory is None else size["blocks"] * reported["block_size"]
    held = held if kv_tokens is None else kv_tokens
    hits = hit_rate if hit_rate is not None else measured.hit_rate or 0.0
    demand = planning.Demand(requests_per_second, ttft, ttft_share, input_tokens, input_cv, output_tokens, hits)
    worker = planning.PlannedWorker(
        prefill, decode_s, decode_each_ms / 1e3, chunk_tokens, slots or measured.slots or 256, held
    )
    if input_tokens + output_tokens > context:
        fail(f"{input_tokens + output_tokens:,.0f} tokens do not fit a context of {context:,}")
    try:
        fleet, lacking = planning.plan(demand, worker, None if itl_ms is None else itl_ms / 1e3)
    except ValueError as error:
        source = f"measured: {measured.source}; beside other work it is less" if measured.source else "as given"
        fail(f"{error}, at {prefill:,.0f} prompt tokens/s and {decode_s * 1e3:,.1f} ms a decode step ({source})")
    vault_bytes = vault_minutes * 60 * requests_per_second * (demand.fed_tokens + output_tokens) * token_bytes
    vaults = math.ceil(vault_bytes / parse_bytes(vault_memory)) if vault_bytes else 0
    cost = None
    if price_per_worker_hour is not None:
        cost = fleet.workers * price_per_worker_hour + vaults * price_per_vault_hour
    found = {
        "model": model,
        "engine": engine,
        "workers": fleet.workers,
        "one_fewer_lacks": lacking or None,
        "utilisation": fleet.utilisation,
        "ttft_share": fleet.ttft_share,
        "ttft_s": fleet.ttft_s,
        "itl_s": fleet.itl_s,
        "sequences_per_worker": fleet.sequences,
        "most_sequences_per_worker": fleet.most_sequences,
        "kv_dtype": size["kv_dtype"],
        "kv_bytes_per_token": token_bytes,
        "kv_bytes_per_worker": fleet.kv_tokens * token_bytes / planning.MOST_USED,
        "kv_bytes_given": None if held is None else held * token_bytes,
        "vault_bytes": vault_bytes,
        "vaults": vaults,
        "vllm_flags": _vllm_flags(fleet, token_bytes) if engine == "vllm" else None,
        "cost_per_hour": cost,
        "demand": asdict(demand),
        "worker": asdict(worker),
        "rates_from": measured.source or "given",
        "autoscale": {"max_replicas": fleet.workers + max(1, fleet.workers // 4), "target_ttft_s": ttft},
    }
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False))
        return
    _show(found, vault_minutes)


def _vllm_flags(fleet: planning.PlannedFleet, token_bytes: float) -> dict[str, int]:
    """What vLLM must be given at least, for a worker of one GPU: the memory is a GPU's."""
    return {
        "--max-num-seqs": math.ceil(fleet.most_sequences),
        "--kv-cache-memory-bytes": math.ceil(fleet.kv_tokens * token_bytes / planning.MOST_USED),
    }


def _measure_first(why: str, how: list[str]) -> NoReturn:
    err.print(f"kvfleet: {printable(why)}: measure it:")
    for line in how:
        err.print(f"  {line}")
    err.print("or say --prefill-tokens-per-s and --decode-ms")
    raise typer.Exit(1)


def _measured(path: Path | None, url: str | None, model: str | None, api_key: str | None, engine: str) -> Measured:
    if path is not None and url is not None:
        raise NoRates("--rates and --from-fleet: one of them")
    if path is not None:
        return of_file(path, model, engine)
    return of_fleet(url, model, api_key, engine) if url is not None else Measured()


def _show(found: dict[str, Any], vault_minutes: float) -> None:
    demand, worker = found["demand"], found["worker"]
    table = Table(box=box.SIMPLE_HEAD if out.is_terminal else None, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    lacks = f" (one fewer: not enough {found['one_fewer_lacks']})" if found["one_fewer_lacks"] else ""
    table.add_row("workers", f"{found['workers']:,}{lacks}")
    table.add_row("busy with prompts", f"{found['utilisation']:.0%} of the time")
    within = f"{found['ttft_share']:.1%} within {demand['ttft_s']:g} s"
    table.add_row("first token", f"{within}; {demand['ttft_share']:.0%} within {found['ttft_s']:.2f} s")
    table.add_row("between tokens", f"{found['itl_s'] * 1e3:.1f} ms")
    sequences = f"{found['sequences_per_worker']:.1f}, {found['most_sequences_per_worker']:.0f} at times"
    table.add_row("sequences of a worker", sequences)
    given = "" if found["kv_bytes_given"] is None else f" of {readable(int(found['kv_bytes_given']))}"
    needed = readable(int(found["kv_bytes_per_worker"]))
    table.add_row("KV memory of a worker", f"{needed}{given} ({found['kv_dtype']})")
    if found["vllm_flags"] is not None:
        table.add_row("vLLM, at least", " ".join(f"{flag} {value}" for flag, value in found["vllm_flags"].items()))
    one = "vault" if found["vaults"] == 1 else "vaults"
    vaults = f"{readable(int(found['vault_bytes']))}: {found['vaults']:,} {one}" if found["vaults"] else "none"
    table.add_row(f"vault, for {vault_minutes:g} min", vaults)
    if found["cost_per_hour"] is not None:
        per_1000 = found["cost_per_hour"] / (demand["requests_per_s"] * 3.6)
        table.add_row("cost", f"{found['cost_per_hour']:,.2f} an hour, {per_1000:,.4f} per 1,000 requests")
    out.print(table)
    err.print(
        f"Reckoned for random arrivals, {demand['input_tokens']:,.0f} tokens in (cv {demand['input_cv']:g}, "
        f"{demand['hit_rate']:.0%} cached), {demand['output_tokens']:,.0f} out, workers that feed "
        f"{worker['prefill_tokens_per_s']:,.0f} tokens/s and take {worker['decode_s'] * 1e3:.1f} ms a step "
        f"({found['rates_from']}). What it leaves out: docs/capacity.md",
    )
