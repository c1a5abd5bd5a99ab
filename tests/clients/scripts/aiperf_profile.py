"""AIPerf: short runs of its requests, chats and completions, on synthetic prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from checks import BASE, KEY, MODEL, TOKENIZER, run_checks, run_command

NAME = "local/tokenizer"  # without a network it takes tokenizers from the hub's cache alone
REQUESTS, PROMPT, OUTPUT = 6, 64, 16


def put_tokenizer_into_cache() -> None:
    cached = Path(os.environ["HF_HOME"], "hub", f"models--{NAME.replace('/', '--')}")
    (cached / "refs").mkdir(parents=True, exist_ok=True)
    (cached / "refs/main").write_text("0")
    (cached / "snapshots").mkdir(exist_ok=True)
    if not (cached / "snapshots/0").exists():
        (cached / "snapshots/0").symlink_to(TOKENIZER)


def profile(kind: str, *flags: str, requests: int = REQUESTS, output: int = OUTPUT, concurrency: int = 2) -> Any:
    put_tokenizer_into_cache()
    run_command(
        "aiperf", "profile", "--model", MODEL, "--url", BASE, "--api-key", KEY, "--endpoint-type", kind,
        "--tokenizer", NAME, "--concurrency", str(concurrency), "--request-count", str(requests), "--isl", str(PROMPT),
        "--osl", str(output), "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", kind,
        "--no-gpu-telemetry", "--no-server-metrics", *flags,
    )  # fmt: skip
    found = json.loads(Path(kind, "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == requests
    assert found["error_summary"] == []
    assert found["usage_completion_tokens"]["min"] == found["usage_completion_tokens"]["max"] == output
    return found


def check_chat() -> Any:
    found = profile("chat", "--streaming")
    assert found["time_to_first_token"]["count"] == found["inter_token_latency"]["count"] == REQUESTS
    assert found["time_to_first_token"]["max"] < found["request_latency"]["max"]
    return found["time_to_first_token"]


def check_completions() -> Any:
    return profile("completions", "--streaming")["request_throughput"]


if __name__ == "__main__":
    run_checks(globals())
