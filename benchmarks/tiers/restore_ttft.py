"""Time to first token of a turn whose history is cold, in a vault, on the host, or on the device: one engine, in turn.

    python -m benchmarks.restore_ttft [--quick] [--dtype float32|bfloat16] [--codec raw|int8] [--threads N]
    python -m benchmarks.restore_ttft --lengths [--plot FILE.svg]       500 to 8,000 tokens, and 30,561 on a small model
    python -m benchmarks.restore_ttft --device cuda [--quick] [--dry]   on a GPU: 30,000 tokens, Qwen2.5-7B's shape

Random weights in the shape of Qwen2-0.5B; the vault is a process of its own, reached over its Unix socket. A turn is a
history of 2,000 cached tokens and 16 new ones. Each round has a history of its own: cold, then from the device, then
with the device's blocks overwritten from the host, then with the host's overwritten too from the vault, each time with
other new tokens, so that all but the cold one run the same step of 16. The values are ratios of medians to cold. That
the answers are right is a test (tests/exactness/test_tiers_exact).

On a GPU a short prompt takes little longer than the step that each way ends with, so it is a long one. The vault's
floor is lower there: a GPU that computes 20,000 tokens a second makes 1.1 GB of K and V, and a vault's link brings 4 to
7 GB meanwhile.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.engine._engine import BLOCK, CORES, fresh_prompts
from benchmarks.engine._engine_models import model_folder, small_config, with_context
from benchmarks.harness.gpu import add_device, check_device, shape_folder, told_device
from benchmarks.harness.report import finish, parser, progress, skip, spread
from benchmarks.tiers._tiered import TieredOurs
from benchmarks.tiers._vault import Vault
from kvfleet.worker.model.loader import Device
from kvproto.dataplane.block import BlockCodec
from kvproto.messages import Tier
from kvservice import launch

PROMPT, NEW = 2_000, 16
LENGTHS = (500, 1_000, 2_000, 4_000, 8_000)
LONG, GPU_PROMPT, DRY_PROMPT = 30_561, 30_000, 200
VAULT_FLOOR, HOST_FLOOR, LONG_FLOOR, GPU_VAULT_FLOOR = 8.0, 10.0, 20.0, 2.0
NAME, UNIT, PEER = "restore_ttft", "times faster than cold, from the vault", "the same engine, nothing cached"
WAYS = ("cold", "device", "host", "vault")


def measure(ours: TieredOurs, length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token, by where the history was."""
    chance = Random(length)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}

    def fresh(count: int) -> list[int]:
        return fresh_prompts(chance, 1, count, ours.vocab_size)[0]

    for number in range(rounds):
        history = fresh(length)
        for way in WAYS:
            if way == "host":
                ours.flush(Tier.DEVICE)
            elif way == "vault":
                ours.flush(Tier.DEVICE, Tier.HOST)
            run = ours.generate([history + fresh(NEW)], 1)
            taken[way].append(run.ttft_s[0])
            restored = {tier.value: count for tier, count in ours.restored[0].items()}
            expected = length - length % BLOCK
            if way in ("host", "vault") and restored.get(way, 0) < 0.9 * expected:
                progress(f"  {way}: only {restored} restored")
            ours.settle()
        shown = ", ".join(f"{way} {taken[way][-1] * 1000:.1f}" for way in WAYS)
        progress(f"{length} tokens, round {number + 1}: {shown} ms")
        ours.flush(Tier.DEVICE, Tier.HOST)
    return taken


def engine(
    dtype: Any,
    codec: BlockCodec,
    threads: int,
    context: int,
    vault: Vault,
    folder: Path,
    *,
    dummy: bool = False,
    device: Device = "cpu",
) -> TieredOurs:
    blocks = -(-(context + NEW + BLOCK) // BLOCK)
    ours = TieredOurs(
        folder,
        dtype,
        context=context + NEW + 1,
        sequences=1,
        threads=threads,
        host_blocks=blocks + 64,
        vault=vault,
        codec=codec,
        keeps_all=True,
        load_format="dummy" if dummy else "auto",
        device=device,
    )
    chance = Random(1)
    for _ in range(2):  # warm up: memory, kernels, connections
        turn = fresh_prompts(chance, 1, min(context, 600), ours.vocab_size)[0]
        ours.generate([turn], 1)
        ours.flush(Tier.DEVICE, Tier.HOST)
        ours.generate([turn], 1)
    return ours


def one_length(options: Any) -> None:
    codec, on_gpu = BlockCodec(options.codec), options.device == "cuda"
    prompt = DRY_PROMPT if options.dry else GPU_PROMPT if on_gpu else PROMPT
    dtype: Any = "bfloat16" if on_gpu and not options.dry else options.dtype
    floor = GPU_VAULT_FLOOR if on_gpu else VAULT_FLOOR
    check_device(options, NAME, UNIT, floor=floor, peer=PEER)
    with Vault(4 << 30) as vault, tempfile.TemporaryDirectory() as made:
        folder = shape_folder(made, dry=options.dry) if on_gpu else model_folder("qwen2-0.5b", dtype)
        device: Device = "cuda" if on_gpu and not options.dry else "cpu"
        ours = engine(dtype, codec, options.threads, prompt, vault, folder, dummy=on_gpu, device=device)
        taken = measure(ours, prompt, 1 if options.dry else 3 if options.quick else 7)
        ours.close()
    if options.dry:
        skip(NAME, UNIT, floor=floor, peer=PEER, why="a dry run came to its end")
    cold = median(taken["cold"])
    by = {way: cold / median(taken[way]) for way in WAYS[1:]}
    finish(
        NAME,
        round(by["vault"], 2),
        UNIT,
        floor=floor,
        ok=by["vault"] >= floor and by["host"] >= HOST_FLOOR,
        peer=PEER,
        host=round(by["host"], 2),
        host_floor=HOST_FLOOR,
        device=round(by["device"], 2),
        vault_over_device=round(median(taken["vault"]) / median(taken["device"]), 3),
        host_over_device=round(median(taken["host"]) / median(taken["device"]), 3),
        seconds={way: spread(values) for way, values in taken.items()},
        prompt_tokens=prompt + NEW,
        dtype=dtype,
        codec=codec.value,
        threads=options.threads,
        **told_device(options),
    )


def all_lengths(options: Any) -> None:
    rounds = 1 if options.quick else 3
    rows: list[dict[str, Any]] = []
    with Vault(8 << 30) as vault, tempfile.TemporaryDirectory() as made:
        folders = Path(made) / "qwen", Path(made) / "small"
        for folder in folders:
            folder.mkdir()
        longer = with_context(model_folder("qwen2-0.5b", "bfloat16"), 2 * LENGTHS[-1], folders[0])
        for length in LENGTHS:
            ours = engine("bfloat16", BlockCodec.RAW, options.threads, length, vault, longer)
            taken = measure(ours, length, rounds)
            ours.close()
            rows.append({"model": "Qwen2-0.5B shape, bf16", "tokens": length} | _medians(taken))
        ours = engine("float32", BlockCodec.RAW, options.threads, LONG, vault, small_config(folders[1]), dummy=True)
        rows.append({"model": "small, fp32", "tokens": LONG} | _medians(measure(ours, LONG, rounds)))
        ours.close()
    if options.plot:
        from benchmarks.tiers._restore_plot import write_plot  # of the extra `plot`

        write_plot(Path(options.plot), rows)
    long = rows[-1]
    ratio = long["cold"] / long["vault"]
    finish(
        "restore_ttft_lengths",
        round(ratio, 2),
        f"times faster than cold, from the vault, {LONG} tokens",
        floor=LONG_FLOOR,
        ok=ratio >= LONG_FLOOR,
        peer=PEER,
        restore_over_device={str(row["tokens"]): round(row["vault"] / row["device"], 3) for row in rows},
        rows=rows,
        threads=options.threads,
    )


def _medians(taken: dict[str, list[float]]) -> dict[str, float]:
    return {way: round(median(values), 5) for way, values in taken.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    arguments.add_argument("--codec", default="raw", choices=["raw", "int8"])
    arguments.add_argument("--threads", type=int, default=CORES)
    add_device(arguments)
    arguments.add_argument("--lengths", action="store_true", help="500 to 8,000 tokens, and 30,561")
    arguments.add_argument("--plot", help="with --lengths: write the curves to this SVG file")
    options = arguments.parse_args()
    if options.plot:
        launch.with_extra("plot", lambda: launch.imported("matplotlib"))  # before minutes of work, not after them
    if options.lengths:
        all_lengths(options)
    one_length(options)


if __name__ == "__main__":
    main()
