"""GuideLLM: short runs of chats and of completions on synthetic prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from checks import BASE, KEY, MODEL, TOKENIZER, run_checks, run_command

REQUESTS, PROMPT, OUTPUT = 6, 64, 16


def check_chat() -> Any:
    return measured("/v1/chat/completions")


def check_completions() -> Any:
    return measured("/v1/completions")


def measured(route: str) -> float:
    os.environ["GUIDELLM__MP_POLL_INTERVAL"] = "1"  # on a crowded machine 0.1 s leave the last answer uncounted
    run_command(
        "guidellm", "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={BASE},model={MODEL},api_key={KEY},request_format={route}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output", "kind=json,path=report.json",
    )  # fmt: skip
    (found,) = json.loads(Path("report.json").read_text())["benchmarks"]
    state, metrics = found["scheduler_state"], found["metrics"]
    assert (state["successful_requests"], state["errored_requests"]) == (REQUESTS, 0), state
    assert metrics["output_token_count"]["successful"]["mean"] == OUTPUT
    assert metrics["prompt_token_count"]["successful"]["mean"] >= PROMPT
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
    return float(metrics["request_latency"]["successful"]["mean"])


if __name__ == "__main__":
    run_checks(globals())
