"""`kvfleet chat`: a conversation in the terminal, with each turn's reuse and time to first token."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated, Any

import httpx
import typer

from kvfleet.cli.clients.answers import AnswerFailed, AnswerRefused, asking, client, events, get, reading
from kvfleet.cli.clients.generate import (
    DEFAULT_URL,
    STREAMING,
    ContextOverflow,
    Key,
    MinP,
    Policy,
    RepetitionPenalty,
    Url,
    Worker,
    given,
)
from kvfleet.cli.console import err, fail, out, printable

with contextlib.suppress(ImportError):  # its import gives input() line editing and history
    import readline  # noqa: F401


def chat(
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="default: the fleet's first model")] = None,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, help="default: the model's")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    context_overflow: ContextOverflow = None,
    policy: Policy = None,
    worker: Worker = None,
    api_key: Key = None,
) -> None:
    """Talk to a model. Empty line or Ctrl-D ends; /new starts over."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    options: dict[str, Any] = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    options |= given(
        temperature=temperature,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        context_overflow=context_overflow,
        policy=policy,
        worker=worker,
    )
    with client(api_key, timeout=STREAMING) as http:
        model = model or _first_model(http, url)
        _say(f"{model} at {url} · an empty line ends, /new starts over")
        while (said := _ask()) is not None:
            if said == "/new":
                messages = messages[:1] if system else []
                continue
            messages.append({"role": "user", "content": said})
            answer = _turn(http, url, {"model": model, "messages": messages, **options})
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _first_model(http: httpx.Client, url: str) -> str:
    with asking(url):
        models = get(http, f"{url}/v1/models")["data"]
        if not models:
            fail("the fleet serves no model yet")
        return str(models[0]["id"])


def _ask() -> str | None:
    try:
        if sys.stdin.isatty():
            line = out.input("[bold cyan]you[/bold cyan] ")
        else:
            line = sys.stdin.readline().rstrip("\n")
            if line:
                out.print(f"you {line}")
    except (EOFError, KeyboardInterrupt):
        out.print()
        return None
    return line.strip() or None


def _turn(http: httpx.Client, url: str, body: dict[str, Any]) -> str | None:
    """Streams one answer and returns it; None if it failed, which stderr says and the conversation survives."""
    began = time.monotonic()
    first: float | None = None
    text = ""
    usage: dict[str, Any] = {}
    out.print(printable(body["model"]), style="bold green", end=" ")
    try:
        with reading(url), http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            event: dict[str, Any] | None = None
            for event in events(response):
                if "error" in event:
                    err.print()
                    _say(str(event["error"].get("message")), "red")
                    return None
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece:
                        first = first or time.monotonic()
                        text += piece
                        out.print(piece, end="")
            if event is None:
                raise AnswerFailed(f"{url}: no answer came: is an ingress there?")
    except AnswerFailed as error:
        if not isinstance(error, AnswerRefused):
            err.print()
        _say(str(error), "red")
        return None
    except KeyboardInterrupt:
        err.print("\nstopped", style="dim")
        return text or None
    out.print()
    prompt = usage.get("prompt_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    ttft = 1000 * ((first or time.monotonic()) - began)
    generated = usage.get("completion_tokens", 0)
    _say(f"{cached} of {prompt} prompt tokens cached · {generated} generated · TTFT {ttft:.0f} ms")
    return text


def _say(line: str, style: str = "dim") -> None:
    err.print(printable(line), style=style)
