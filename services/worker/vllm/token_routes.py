"""Loop: vLLM's token routes over HTTP: ids in, ids out. Owned by the sidecar's event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from kvproto.errors import ContextLengthExceeded, EngineFailure, InvalidRequest, KvfleetError, ModelNotFound
from kvproto.messages import TokenLogprobs

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ID_PREFIX = "generate-tokens-"  # what vLLM puts in front of a request's id, and wants back to abort it
CONNECT_S = 5.0
ANSWER_S = 10.0  # for a short question
ORDER_S = 120.0  # for what makes it read weights
MAX_LINE = 1 << 20  # bytes of one chunk
MAX_ERROR = 500  # characters of a foreign message that are repeated


class Answered(EngineFailure):
    """The server is there, and answered something else than it should, with this HTTP status. `said`: its own words."""

    def __init__(self, message: str, status: int, said: str = "") -> None:
        super().__init__(message)
        self.status, self.said = status, said


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Some next tokens of a sequence. `finish`: it ends with them, by `stop`, the id, if that is the reason."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None
    stop: int | None = None


class TokenRoutes:
    """`url` is the server's, without a path. `open` first, on the loop."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(self.url, timeout=timeout, connector=connector, read_bufsize=MAX_LINE)

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, body: Mapping[str, Any], alternatives: int = 0) -> AsyncGenerator[NextTokens, None]:
        """Stream one sequence. Leaving the iteration closes the connection, which aborts it.

        Log probabilities have so many `alternatives`: a body that asks for them has to ask for one more, as vLLM counts
        the drawn token among them. Raises InvalidRequest, ContextLengthExceeded, ModelNotFound, or EngineFailure for
        all that is not the request's fault.
        """
        try:
            async with self._session.post(
                GENERATE, data=orjson.dumps(body), headers={"content-type": "application/json"}
            ) as answer:
                if answer.status != 200:
                    raise _refusal(answer.status, await answer.text(errors="replace"))
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        if line.startswith(b"data: [DONE]"):
                            return
                        for part in _parts(line[6:], alternatives):
                            yield part
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._gone(error) from error
        raise EngineFailure(f"vLLM at {self.url} ended a stream before its end")

    async def score(self, body: Mapping[str, Any]) -> tuple[TokenLogprobs, ...]:
        """Of all tokens of a prompt but the first, by a body that asks for `prompt_logprobs` and for no stream, where
        vLLM tells none. Leaving the call aborts it. Raises as `generate` does."""
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(GENERATE, data=orjson.dumps(body), headers=headers) as answer:
                found = await answer.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._gone(error) from error
        if answer.status != 200:
            raise _refusal(answer.status, found.decode(errors="replace"))
        asked = body["sampling_params"]["prompt_logprobs"]
        return await asyncio.to_thread(_scores, found, body["token_ids"], asked)  # it may have megabytes

    def _gone(self, error: Exception) -> EngineFailure:
        return EngineFailure(f"vLLM at {self.url} is gone: {type(error).__name__}: {error}")

    async def abort(self, request: str) -> None:
        """Raises EngineFailure."""
        await self._ask("POST", ABORT, {"request_ids": [ID_PREFIX + request]})

    async def get(self, path: str) -> bytes:
        """Raises EngineFailure unless it is answered with 200 in time, Answered if with something else."""
        return await self._ask("GET", path)

    async def order(self, path: str, body: Mapping[str, Any]) -> None:
        """Something other than tokens. Raises EngineFailure, Answered if it is refused."""
        await self._ask("POST", path, body, ORDER_S)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, limit_s: float = ANSWER_S
    ) -> bytes:
        data = None if body is None else orjson.dumps(body)
        headers = {"content-type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._session.request(method, path, data=data, headers=headers, timeout=timeout) as answer:
                found = await answer.read()
        except aiohttp.ClientResponseError as error:
            raise Answered(f"{self.url}{path} answers no HTTP: {_line(error.message)}", error.status) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailure(f"{self.url}{path} does not answer: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            text = found.decode(errors="replace")
            raise Answered(f"{self.url}{path} answers {answer.status}: {_line(text)}", answer.status, _said(text))
        return found


def _parts(data: bytes, alternatives: int) -> list[NextTokens]:
    """What one chunk tells. Raises EngineFailure if it is no chunk, or tells of an error."""
    try:
        chunk = orjson.loads(data)
        if "error" in chunk:
            raise _error(chunk["error"]["code"], _message(chunk))  # as a status, after one of 200
        return [_part(choice, alternatives) for choice in chunk["choices"]]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise EngineFailure(f"vLLM sent a chunk that is none: {type(error).__name__}: {data[:80]!r}") from error


def _part(choice: Mapping[str, Any], alternatives: int) -> NextTokens:
    scored = (choice.get("logprobs") or {}).get("content") or ()
    logprobs = tuple(_logprobs(one, alternatives) for one in scored)
    return NextTokens(tuple(choice["token_ids"] or ()), logprobs, choice["finish_reason"], choice.get("stop_reason"))


def _scores(data: bytes, ids: Sequence[int], alternatives: int) -> tuple[TokenLogprobs, ...]:
    """Raises EngineFailure."""
    scores = []
    try:
        for token, told in zip(ids, orjson.loads(data)["prompt_logprobs"], strict=True):
            if told is not None:  # but for the first
                own, best = told[str(token)], sorted((-one["logprob"], int(at)) for at, one in told.items())
                tops = tuple(at for _, at in best[:alternatives]), tuple(-value for value, _ in best[:alternatives])
                scores.append(TokenLogprobs(own["logprob"], *tops, own["rank"]))
        if len(scores) != len(ids) - 1:
            raise ValueError(f"{len(scores)} scores")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise EngineFailure(f"vLLM sent scores of a prompt of {len(ids)} tokens that are none: {why}") from error
    return tuple(scores)


def _logprobs(scored: Mapping[str, Any], alternatives: int) -> TokenLogprobs:
    """vLLM lists the drawn token first, then the others from the best on. Of equal ones ours come in id order."""
    best = sorted((-one["logprob"], _token(one)) for one in scored["top_logprobs"])[:alternatives]
    return TokenLogprobs(scored["logprob"], tuple(token for _, token in best), tuple(-value for value, _ in best))


def _token(scored: Mapping[str, Any]) -> int:
    return int(scored["token_id"] if "token_id" in scored else scored["token"].removeprefix("token_id:"))  # before 0.32


def _refusal(status: int, text: str) -> KvfleetError:
    return _error(status, _said(text))


def _said(text: str) -> str:
    try:
        return _message(orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError, AttributeError):
        return _line(text)


def _error(status: int, message: str) -> KvfleetError:
    """What is the request's own fault is not retryable: it would fail at every worker."""
    if status == 400:
        kind = ContextLengthExceeded if re.search("maximum (context|model) length", message) else InvalidRequest
        return kind(f"vLLM refuses it: {message}")
    if status == 404:
        return ModelNotFound(f"vLLM does not have it: {message}", field="model")
    return Answered(f"vLLM failed with {status}: {message}", status)


def _message(found: Mapping[str, Any]) -> str:
    error = found.get("error", found)
    return _line(str(error.get("message", error) if isinstance(error, Mapping) else error))


def _line(text: str) -> str:
    """A foreign text, which may be a whole page, in one line."""
    return " ".join(text[:MAX_ERROR].split())
