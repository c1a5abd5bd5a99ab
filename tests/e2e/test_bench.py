"""`kvfleet bench` against a fleet: every shape, and what a cache is worth to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench_command import bench, bench_json
from tests.support.up import Up

SMALL = ("--prefix-tokens=160", "--prompt-tokens=24", "--output-tokens=8", "--concurrency=2", "--no-overhead")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Up]:
    fleet = Up("--port", "0", "--dtype", "float32")
    try:
        yield fleet.wait_ready()
    finally:
        fleet.stop()


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("shape", ["chat", "rag", "agent", "oneshot"])
def test_every_shape(fleet: Up, shape: str, endpoint: str) -> None:
    turns = {"chat": 3, "agent": 3}.get(shape, 1)
    found = bench_json(
        fleet.base, f"--shape={shape}", f"--endpoint={endpoint}", *SMALL, f"--turns={turns}", "--pause=0.01",
        "--documents=2", "--requests=12", "--seed=5", "--spread=0",
    )  # fmt: skip
    assert (found["requests"], found["errors"], found["shape"]) == (12, 0, shape)
    assert found["output_tokens"] == 12 * 8, "answers have the length that was asked for"
    for name in ("ttft_s", "e2e_s"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["tokens_per_s"] > 0
    # Prompts of random words share what their shape says.
    assert found["cached_share"] > 0.4 if shape != "oneshot" else found["cached_share"] < 0.95


def test_prompts_have_the_length_that_was_asked_for(fleet: Up) -> None:
    """In tokens of the model, which two probes learn of its usage; a chat template adds its own."""
    asked = ("--shape=oneshot", "--endpoint=completions", "--prompt-tokens=300", "--output-tokens=2", "--spread=0")
    found = bench_json(fleet.base, *asked, "--prefix-tokens=0", "--requests=6", "--no-overhead")
    assert found["prompt_tokens"] / 6 == pytest.approx(300, rel=0.1)


def test_other_words_of_the_same_lengths_are_in_no_cache(fleet: Up) -> None:
    asked = ("--shape=oneshot", "--prompt-tokens=200", "--output-tokens=4", "--requests=6", "--seed=9", "--no-overhead")
    bench_json(fleet.base, *asked)
    assert bench_json(fleet.base, *asked)["cached_share"] > 0.9
    assert bench_json(fleet.base, *asked, "--text-seed=10")["cached_share"] < 0.3


def test_a_trace(fleet: Up, tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 700, "output_length": 4}
    rows = [line | {"hash_ids": [1, at], "timestamp": 1000 * at} for at in range(2, 6)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bench_json(fleet.base, f"--trace={trace}", "--speed=4", "--no-overhead")
    assert (found["requests"], found["errors"], found["output_tokens"]) == (4, 0, 16)
    assert found["cached_share"] > 0.3, "512 tokens of 700 are shared"


def test_a_rate_and_a_table(fleet: Up) -> None:
    done = bench(fleet.base, "--shape=oneshot", *SMALL[1:], "--rate=10", "--duration=2")
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("Poisson, 10 requests/s", "time to first token", "tokens/s", "cached:", "errors", "this client"):
        assert line in done.stdout


def test_a_model_that_is_not_there_is_one_line(fleet: Up) -> None:
    done = bench(fleet.base, "--model=nope")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nope" in done.stderr
    assert done.stderr.count("\n") == 1
