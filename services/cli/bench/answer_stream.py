"""A streamed answer of OpenAI's form, read as its bytes come. Pure.

The client's cost lies here: bytes are split at line ends, each event is parsed once, and the time is that of the bytes
that it came with.
"""

from __future__ import annotations

from typing import Any

import orjson


class Meter:
    """Tokens that came, of all answers: one counter, which the live page reads."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events = 0


class AnswerStream:
    """Events with text are tokens. `times`: when each came; `last`: when the last event with a choice did."""

    __slots__ = ("_meter", "_rest", "broken", "done", "error", "finished", "last", "texts", "times", "usage")

    def __init__(self, meter: Meter) -> None:
        self.times: list[float] = []
        self.texts: list[str] = []
        self.last = 0.0
        self.usage: dict[str, Any] | None = None
        self.finished = False  # a finish reason came
        self.done = False  # `[DONE]` came
        self.error = ""  # the server's, within the stream
        self.broken = ""  # what is no event of OpenAI's form
        self._rest = b""
        self._meter = meter

    def feed(self, body: bytes, now: float) -> None:
        lines = (self._rest + body).split(b"\n") if self._rest else body.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line[:5] == b"data:":
                self._event(line[5:], now)

    def _event(self, data: bytes, now: float) -> None:
        try:
            event = orjson.loads(data)
            if choices := event.get("choices"):
                choice = choices[0]
                delta = choice.get("delta")
                text = choice.get("text") if delta is None else _said(delta)
                if text:
                    self.times.append(now)
                    self.texts.append(str(text))
                    self._meter.events += 1
                self.last = now
                self.finished = self.finished or bool(choice.get("finish_reason"))
            if usage := event.get("usage"):
                self.usage = dict(usage)
            if (error := event.get("error")) is not None:
                self.error = str(error.get("message", error) if isinstance(error, dict) else error)
        except orjson.JSONDecodeError:
            if data.strip() == b"[DONE]":
                self.done = True
            else:
                self.broken = f"an event that is no JSON: {data[:80]!r}"
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.broken = f"an event of another form ({error}): {data[:80]!r}"

    def count(self, *path: str) -> int | None:
        """A number of the usage, None where the server does not tell it."""
        value: Any = self.usage
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value if type(value) is int else None


def _said(delta: dict[str, Any]) -> Any:
    """Text of any kind is a token that was waited for: content, reasoning, a call's arguments."""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
