"""What AIPerf measures of a server whose times are known; its figures in seconds.

Its inter-token latency is a request's mean time per token after the first.
"""

from __future__ import annotations

import os
from typing import Any

from aiperf_profile import profile
from checks import run_checks

LOAD = {
    "requests": int(os.environ["KVFLEET_REQUESTS"]), "output": int(os.environ["KVFLEET_OUTPUT"]),
    "concurrency": int(os.environ["KVFLEET_CONCURRENCY"]),
}  # fmt: skip
NAMES = {"ttft_s": "time_to_first_token", "tpot_s": "inter_token_latency", "e2e_s": "request_latency"}


def figures(kind: str) -> Any:
    found = profile(kind, "--streaming", **LOAD)
    for name in NAMES.values():
        assert found[name]["unit"] == "ms"
    seconds = {
        ours: {
            name: found[theirs][key] / 1000
            for name, key in (("mean", "avg"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"))
        }
        for ours, theirs in NAMES.items()
    }
    return {**seconds, "tokens_per_s": found["output_token_throughput"]["avg"]}


def check_chat() -> Any:
    return figures("chat")


def check_completions() -> Any:
    return figures("completions")


if __name__ == "__main__":
    run_checks(globals())
