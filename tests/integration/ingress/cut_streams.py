"""A client whose connection breaks: reads some events of a stream, closes its socket, comes back with the last id."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ingress_rig import Served, until

from tests.support import sse


@dataclass(frozen=True)
class Event:
    id: str
    data: Any  # of JSON; "[DONE]" as it is


async def read(
    served: Served, path: str, body: dict[str, Any], *, events: int | None = None, **headers: str
) -> list[Event]:
    """All events, or so many: then the connection is closed and the ingress has noticed."""
    found: list[Event] = []
    sent = {"accept": "text/event-stream; event-ids=1"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    async with served.http.stream("POST", path, json=body, headers=sent) as answer:
        assert answer.status_code in (200, 204), (answer.status_code, await answer.aread())
        last = ""
        async for line in sse.alines(answer):
            if line.startswith("id: "):
                last = line.removeprefix("id: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append(Event(last, data if data == "[DONE]" else json.loads(data)))
                if len(found) == events:
                    break
    if events is not None:
        await until(lambda: not served.ingress.admission.running)
    return found


def texts(events: list[Event]) -> dict[int, str]:
    """By choice; of /generate there is one."""
    out: dict[int, str] = defaultdict(str)
    for event in events:
        if event.data == "[DONE]":
            continue
        if event.data.get("type") == "token":
            out[0] += event.data["token"]
        for choice in event.data.get("choices", ()):
            out[choice["index"]] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return dict(out)


def steps(events: list[Event]) -> dict[Any, list[Any]]:
    """All that a client acts on, in its order, choice by choice, but names and times of a run."""
    out: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        if event.data == "[DONE]":
            out["end"].append(event.data)
        elif "choices" not in event.data:
            kept = ("type", "token", "token_id", "generated_text", "finish_reason", "tokens_generated", "prompt")
            out["native"].append({name: event.data[name] for name in kept if name in event.data})
        else:
            for choice in event.data["choices"]:
                out[choice["index"]].append(choice)
            if event.data.get("usage"):
                out["usage"].append(event.data["usage"]["completion_tokens"])
    return dict(out)
