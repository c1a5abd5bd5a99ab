"""`kvfleet generate`: continue a text, streaming."""

from __future__ import annotations

import time
from typing import Annotated, Any

import httpx
import typer

from kvfleet.cli.clients.answers import AnswerFailed, asking, client, events
from kvfleet.cli.console import err, fail, out


def known_url(url: str | None) -> str | None:
    """An option's callback: fails for an address that no request can go to."""
    if url is not None:
        try:
            httpx.URL(url).host.encode("idna")  # as a look-up of the name does
        except (httpx.InvalidURL, UnicodeError) as error:
            fail(f"{url}: {error}")
    return url


def known_key(api_key: str | None) -> str | None:
    """An option's callback: fails for a key that no header can hold, without showing it."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        fail("the API key has a character that is not printable ASCII: no key of an ingress has one")
    return api_key


Url = Annotated[str, typer.Option(envvar="KVFLEET_URL", help="the ingress", callback=known_url)]
Key = Annotated[str | None, typer.Option(envvar="KVFLEET_API_KEY", callback=known_key)]
STREAMING = httpx.Timeout(10.0, read=300.0)
DEFAULT_URL = "http://127.0.0.1:8080"
MinP = Annotated[float | None, typer.Option(min=0, max=1, help="least probability, as a share of the best token's")]
RepetitionPenalty = Annotated[float | None, typer.Option(min=0.001, help="above 1: say less of what was said")]
ContextOverflow = Annotated[
    str | None,
    typer.Option(help="what does not fit the context: error, truncate_left, truncate_generation or sliding"),
]
Policy = Annotated[str | None, typer.Option(help="placement policy; an API key must permit it")]
Worker = Annotated[str | None, typer.Option(help="this worker and no other: the policy direct")]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; the server chooses the others."""
    return {name: value for name, value in options.items() if value is not None}


def logprob_line(event: dict[str, Any]) -> str:
    top = "  ".join(f"{one['token']!r} {one['logprob']:.3f}" for one in event["top_logprobs"])
    return f"{event['token']!r} {event['logprob']:.3f}" + (f"   of {top}" if top else "")


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
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: Annotated[float | None, typer.Option(min=-2, max=2)] = None,
    frequency_penalty: Annotated[float | None, typer.Option(min=-2, max=2)] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="no stop token before so many")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, max=20, help="list each token's log probability and so many alternatives")
    ] = None,
    context_overflow: ContextOverflow = None,
    policy: Policy = None,
    worker: Worker = None,
    api_key: Key = None,
) -> None:
    """Continue a text; the session's id, cached tokens and TTFT go to stderr, and log probabilities where asked for."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p} | given(
        seq_id=seq_id or None,
        stop=stop or None,
        model_name=model or None,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        logprobs=logprobs,
        context_overflow=context_overflow,
        policy=policy,
        worker=worker,
    )
    scored: list[dict[str, Any]] = []
    began = time.monotonic()
    first: float | None = None
    ended: dict[str, Any] | None = None
    with (
        asking(url),
        client(api_key, timeout=STREAMING) as http,
        http.stream("POST", f"{url}/generate", json=body) as response,
    ):
        cached, request = 0, ""
        for event in events(response):
            if event["type"] == "start":
                cached = event["cached_tokens"]
                seq_id, request = event["seq_id"], event["request_id"]
            elif event["type"] == "token":
                first = first or time.monotonic()
                out.print(event["token"], end="")
                scored += [event] if "logprob" in event else []
            elif event["type"] == "error":
                fail(f"{event['code']}: {event['error']}")
            else:
                ended = event
        if ended is None:
            raise AnswerFailed(f"{url}: the answer has no end: is an ingress there?")
        out.print()
        for one in scored:
            err.print(logprob_line(one))
        ttft = 1000 * ((first or time.monotonic()) - began)
        err.print(
            f"seq_id {seq_id} · {ended['tokens_generated']} tokens · {cached} cached · "
            f"TTFT {ttft:.0f} ms · {ended['finish_reason']} · request {request}",
            style="dim",
        )
