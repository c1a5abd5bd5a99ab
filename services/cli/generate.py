"""`kvfleet generate`: continue a text, streaming."""

from __future__ import annotations

import time
from typing import Annotated, Any

import httpx
import typer

from services.cli import sse
from services.cli.console import err, fail, out

Url = Annotated[str, typer.Option(envvar="KVFLEET_URL", help="the ingress")]
Key = Annotated[str | None, typer.Option(envvar="KVFLEET_API_KEY")]
DEFAULT_URL = "http://127.0.0.1:8080"


def headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="default: the fleet's only model")] = None,
    seq_id: Annotated[str | None, typer.Option(help="continue this session")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 50,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option()] = None,
    api_key: Key = None,
) -> None:
    """Continue a text; the session's id, cached tokens and TTFT go to stderr."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    body |= {"seq_id": seq_id} if seq_id else {}
    body |= {"seed": seed} if seed is not None else {}
    body |= {"stop": stop} if stop else {}
    body |= {"model_name": model} if model else {}
    began = time.monotonic()
    first: float | None = None
    try:
        with (
            httpx.Client(timeout=httpx.Timeout(10.0, read=300.0), trust_env=False) as http,
            http.stream("POST", f"{url}/generate", json=body, headers=headers(api_key)) as response,
        ):
            if response.status_code != 200:
                fail(sse.error_text(response))
            cached = 0
            for event in sse.events(response):
                if event["type"] == "start":
                    cached = event["cached_tokens"]
                    seq_id = event["seq_id"]
                elif event["type"] == "token":
                    first = first or time.monotonic()
                    out.print(event["token"], end="", markup=False)
                elif event["type"] == "error":
                    fail(f"{event['code']}: {event['error']}")
                else:
                    out.print()
                    ttft = 1000 * ((first or time.monotonic()) - began)
                    err.print(
                        f"[dim]seq_id {seq_id} · {event['tokens_generated']} tokens · {cached} cached · "
                        f"TTFT {ttft:.0f} ms · {event['finish_reason']}[/dim]"
                    )
    except httpx.HTTPError as error:
        fail(f"{url}: {error or type(error).__name__}")
