"""What `vllm bench serve` measures of a server whose times are known; its figures in seconds."""

from __future__ import annotations

import os
from typing import Any

from checks import run_checks
from vllm_bench import bench

LOAD = {"requests": int(os.environ["KVFLEET_REQUESTS"]), "output": int(os.environ["KVFLEET_OUTPUT"])}
HOW = {
    "max-concurrency": int(os.environ["KVFLEET_CONCURRENCY"]), "percentile-metrics": "ttft,tpot,itl,e2el",
    "metric-percentiles": "50,90,99",
}  # fmt: skip
NAMES = {"ttft_s": "ttft", "itl_s": "itl", "tpot_s": "tpot", "e2e_s": "e2el"}


def figures(backend: str, route: str) -> Any:
    found = bench(backend, route, **LOAD, **HOW)
    seconds = {
        ours: {
            "mean": found[f"mean_{theirs}_ms"] / 1000,
            **{f"p{one}": found[f"p{one}_{theirs}_ms"] / 1000 for one in (50, 90, 99)},
        }
        for ours, theirs in NAMES.items()
    }
    return {**seconds, "tokens_per_s": found["output_throughput"]}


def check_chat() -> Any:
    return figures("openai-chat", "/v1/chat/completions")


def check_completions() -> Any:
    return figures("openai", "/v1/completions")


if __name__ == "__main__":
    run_checks(globals())
