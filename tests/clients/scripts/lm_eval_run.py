"""lm-eval: tasks on local text by log likelihoods and by generation, of completions and of chats."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from checks import KEY, MODEL, OPENAI, TOKENIZER, run_checks, run_command

LINES = [
    {
        "before": "O Romeo, Romeo! wherefore art thou",
        "after": " Romeo?",
        "others": [" Romeo?", " xylophone?"],
        "right": 0,
    },
    {"before": "Good night, good night! parting is such", "after": " sweet", "others": [" zq", " sweet"], "right": 1},
    {"before": "My kingdom for a", "after": " horse", "others": [" horse", " ###"], "right": 0},
]
UNTIL = {"until": ["\n"], "max_gen_toks": 16, "temperature": 0}


def task(name: str, kind: str, target: str, metric: str, **more: Any) -> None:
    """A folder's task, as users write their own. JSON is YAML."""
    lines = Path("lines.jsonl").resolve()
    lines.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    said = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(lines)}},
        "test_split": "test", "output_type": kind,
        "doc_to_text": "{{before}}", "doc_to_target": target, "target_delimiter": "",
        "metric_list": [{"metric": metric, "higher_is_better": True}], **more,
    }  # fmt: skip
    Path(f"{name}.yaml").write_text(json.dumps(said))


def run(model: str, route: str, tasks: str, *flags: str) -> Any:
    os.environ["OPENAI_API_KEY"] = KEY
    arguments = f"model={MODEL},base_url={OPENAI}/{route},tokenizer={TOKENIZER},num_concurrent=2,max_retries=1"
    run_command(
        "lm-eval", "run", "--model", model, "--model_args", arguments, "--tasks", tasks, "--include_path", ".",
        "--output_path", "results", "--log_samples", *flags,
    )  # fmt: skip
    newest = max(Path("results").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    found = json.loads(newest.read_text())
    assert {one["effective"] for one in found["n-samples"].values()} == {len(LINES)}
    samples = [json.loads(line) for path in Path("results").rglob("samples_*.jsonl") for line in path.open()]
    assert samples
    assert all(one["resps"][0] for one in samples)
    return found["results"]


def check_completions() -> Any:
    task("said", "loglikelihood", "{{after}}", "perplexity")
    task("chosen", "multiple_choice", "{{right}}", "acc", doc_to_choice="{{others}}")
    task("rolled", "loglikelihood_rolling", "{{before}}{{after}}", "word_perplexity")
    task("written", "generate_until", "{{after}}", "exact_match", generation_kwargs=UNTIL)
    found = run("local-completions", "completions", "said,chosen,rolled,written")
    assert 1 < found["said"]["perplexity,none"] < math.inf
    assert found["chosen"]["acc,none"] == 1  # Shakespeare's words are likelier than others, to a model that read him
    assert 1 < found["rolled"]["word_perplexity,none"] < math.inf
    return found


def check_chat() -> Any:
    task("spoken", "generate_until", "{{after}}", "exact_match", generation_kwargs=UNTIL)
    return run("local-chat-completions", "chat/completions", "spoken", "--apply_chat_template")


if __name__ == "__main__":
    run_checks(globals())
