"""Texts as tokens and back, and the small routes beside."""

from __future__ import annotations

from typing import Any

import pytest
from ingress_rig import Served
from scripted_worker import CONTEXT, DEMO, ScriptedWorker
from tokenizers import Tokenizer

WORDS = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


async def test_a_text_is_tokens_and_text_again(served: Served, worker: ScriptedWorker) -> None:
    asked = {"model": "demo", "prompt": "Hello, wörld!", "return_token_strs": True}
    told = (await served.http.post("/tokenize", json=asked)).json()
    ids = WORDS.encode("Hello, wörld!").ids
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), CONTEXT)
    assert len(told["token_strs"]) == len(ids)
    plain = (await served.http.post("/tokenize", json={**asked, "add_special_tokens": False})).json()["tokens"]
    back = (await served.http.post("/detokenize", json={"model": "demo", "tokens": plain})).json()
    assert back == {"prompt": "Hello, wörld!"}


async def test_a_chat_is_what_a_worker_gets(served: Served, worker: ScriptedWorker) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Speak."}]}
    told = (await served.http.post("/tokenize", json=chat)).json()
    await served.http.post("/v1/chat/completions", json=chat)
    assert tuple(told["tokens"]) == worker.requests[0][1].prompt_ids
    assert told["token_strs"] is None


async def test_versions_and_pings(served: Served, worker: ScriptedWorker) -> None:
    assert (await served.http.get("/version")).json()["version"]
    assert (await served.http.get("/ping")).status_code == 200


@pytest.mark.parametrize(
    ("route", "fields", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, "model"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 100_000]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    served: Served, worker: ScriptedWorker, route: str, fields: dict[str, Any], field: str
) -> None:
    refused = await served.http.post(route, json=fields)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"] == field
