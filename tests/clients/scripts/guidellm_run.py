"""GuideLLM: short runs of chats and completions, on synthetic prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checks import BASE, KEY, MODEL, TOKENIZER, run_checks, run_command

REQUESTS, PROMPT, OUTPUT = 6, 64, 16


def run(name: str, route: str) -> Any:
    report = Path(f"{name}.json").resolve()
    run_command(
        "guidellm", "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={BASE},model={MODEL},api_key={KEY},request_format={route}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    (found,) = json.loads(report.read_text())["benchmarks"]
    state = found["scheduler_state"]
    assert (state["successful_requests"], state["errored_requests"]) == (REQUESTS, 0)
    metrics = found["metrics"]
    assert metrics["output_token_count"]["successful"]["mean"] == OUTPUT
    assert metrics["prompt_token_count"]["successful"]["mean"] >= PROMPT
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
    return metrics["request_latency"]["successful"]["mean"]


def check_chat() -> Any:
    return run("chat", "/v1/chat/completions")


def check_completions() -> Any:
    return run("text", "/v1/completions")


if __name__ == "__main__":
    run_checks(globals())
