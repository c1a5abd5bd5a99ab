"""The double's HTTP server, which dies and comes back on one port."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from kvfleet_vllm.row_sampling import sampling_of
from kvfleet_vllm.wire import KEY
from kvproto.testing.nats_process import free_ports
from tests.support.vllm_double import toy_model
from tests.support.vllm_double.block_cache import Lora
from tests.support.vllm_double.engine import Engine, Told, request_of
from tests.support.vllm_double.made_with import MadeWith, Spoiled
from tests.support.vllm_double.scheduler import Request

ROUTES = "/inference/v1/"
ADAPTERS = LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_RANK = 16
TRACE = "please check the stack trace above for the root cause"
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{name}"}} {running}
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="{name}"}} {tokens}
# HELP process_open_fds Number of open file descriptors.
# TYPE process_open_fds gauge
process_open_fds 12.0
"""


def made(folder: Path, **more: Any) -> MadeWith:
    """For a model's folder; vLLM connects to the endpoint of its events, and binds that of its replays."""
    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    return MadeWith(events, replay, str(folder), **more)


@dataclass(eq=False)
class VllmDouble:
    made: MadeWith
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of requests that were not probes
    cached: list[int | None] = field(default_factory=list)  # tokens that they found; None: never scheduled

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> VllmDouble:
        """With an empty cache, as another process."""
        self.adapters = {name: _lora(name, path) for name, path in (self.made.adapters or {}).items()}
        self.engine = Engine(self.made)
        self.engine.start()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._on)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def die(self) -> None:
        """As SIGKILL: every connection breaks."""
        if self._runner.server is not None:
            for connection in list(self._runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await self._runner.cleanup()
        await self.engine.die()

    def hang(self) -> None:
        """No further step, though HTTP answers."""
        self.engine.runs.clear()

    def wake(self) -> None:
        self.engine.runs.set()

    def spoil_next(self, *spoiled: Spoiled) -> None:
        self.engine.spoiled += spoiled

    async def _on(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in self.made.answers:
            status, body = self.made.answers[path]
            return web.Response(status=status, body=body)
        if path == "/health":
            return web.Response()
        if path == "/version":
            return web.json_response({"version": self.made.version})
        if path == "/v1/models":
            one = {"id": self.made.name, "object": "model", "root": self.made.model, "parent": None}
            loras = [
                {"id": lora.name, "object": "model", "root": lora.path, "parent": self.made.name}
                for lora in self.adapters.values()
            ]
            return web.json_response({"object": "list", "data": [one | {"max_model_len": self.made.context}, *loras]})
        if path == "/metrics":
            running = len(self.engine.scheduler.running)
            return web.Response(text=METRICS.format(name=self.made.name, running=running, tokens=self.engine.steps))
        if path.startswith(ROUTES) and not self.made.has_routes:
            return _refusal(403, "this route needs --enable-scale-out")
        body = orjson.loads(await request.read() or b"{}")
        if path in ADAPTERS and self.made.loads:
            return self._change_adapters(path, body)
        if path == ROUTES + "abort_requests":
            for name in body["request_ids"]:
                self.engine.abort(name)
            return web.Response()
        if path == ROUTES + "generate":
            return await self._generate(request, body)
        return web.json_response({"detail": "Not Found"}, status=404)

    def _change_adapters(self, path: str, body: Mapping[str, str]) -> web.Response:
        name = body["lora_name"]
        if path == UNLOAD:
            if self.adapters.pop(name, None) is None:
                return _refusal(404, f"The lora adapter '{name}' cannot be found.")
        elif name in self.adapters:
            return _refusal(400, f"The lora adapter '{name}' has already been loaded.")
        else:
            folder = Path(body["lora_path"])
            if not folder.is_dir():
                return _refusal(404, f"Loading lora {name} failed: No adapter found for {folder}")
            if (rank := json.loads((folder / "adapter_config.json").read_text())["r"]) > MAX_RANK:
                why = f"LoRA rank {rank} is greater than max_lora_rank {MAX_RANK}."
                return _refusal(500, f"Call to add_lora method failed: Worker failed with error '{why}', {TRACE}")
            self.adapters[name] = _lora(name, str(folder))
        return web.Response(text="Success")

    async def _generate(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if (refusal := self._refuses(body)) is not None:
            return refusal
        if body.get("priority", 0) > -1000:
            self.bodies.append(body)
        if not body.get("stream"):
            return await self._whole(body)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await answer.prepare(http)
        params, engine = body["sampling_params"], self.engine
        if (asked := (params.get("extra_args") or {}).get(KEY)) is not None and self.made.has_sampler:
            try:  # as validate_params of the sampler: the answer has begun when vLLM finds it
                sampling_of(asked)
            except ValueError as error:
                await _write(answer, _error(400, str(error)))
                await answer.write(b"data: [DONE]\n\n")
                return answer
        made = self._request(body)
        queue = engine.add(made)
        try:
            while True:
                told = await queue.get()
                if told.error is not None:
                    await _write(answer, _error(500, told.error))
                    break
                await _write(answer, _chunk(body.get("request_id", ""), told))
                if told.finish is not None:
                    break
            await answer.write(b"data: [DONE]\n\n")
        except OSError:  # the client has hung up
            pass
        finally:
            if made.finish is None:
                engine.abort(made.request_id)
            engine.queues.pop(made.request_id, None)
            if made.priority > -1000:
                self.cached.append(made.cached)
        return answer

    async def _whole(self, body: dict[str, Any]) -> web.Response:
        """The only form in which vLLM tells scores of a prompt."""
        made = self._request(body)
        queue = self.engine.add(made)
        ids: list[int] = []
        try:
            while made.finish is None or not queue.empty():
                told = await queue.get()
                if told.error is not None:
                    return _refusal(500, told.error)
                ids += told.ids
        finally:
            if made.finish is None:
                self.engine.abort(made.request_id)
            self.engine.queues.pop(made.request_id, None)
            self.cached.append(made.cached)
        asked = made.params["prompt_logprobs"]
        found = toy_model.prompt_scores(made.prompt, made.states, self.made.vocab_size, asked)
        return web.json_response({"choices": [{"index": 0, "token_ids": ids}], "prompt_logprobs": found})

    def _request(self, body: dict[str, Any]) -> Request:
        return request_of(body, self.made.context - len(body["token_ids"]), self.adapters.get(body.get("model", "")))

    def _refuses(self, body: dict[str, Any]) -> web.Response | None:
        ids, params, context = body["token_ids"], body["sampling_params"], self.made.context
        if body.get("model") not in (None, self.made.name, *self.adapters):
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        wrong = None
        if not ids:
            wrong = "The prompt cannot be empty"
        elif len(ids) >= context:
            wrong = f"This model's maximum context length is {context} tokens. However, you have {len(ids)}."
        elif min(ids) < 0 or max(ids) >= self.made.vocab_size:
            wrong = f"Token id {max(ids)} is out of vocabulary"
        elif params.get("max_tokens", 1) < 1:
            wrong = f"max_tokens must be at least 1, got {params['max_tokens']}."
        elif not 0 < params.get("top_p", 1) <= 1:
            wrong = f"top_p must be in (0, 1], got {params['top_p']}."
        return None if wrong is None else _refusal(400, wrong)


def _lora(name: str, path: str) -> Lora:
    return Lora(name, path, zlib.crc32((Path(path) / "adapter_model.safetensors").read_bytes()))


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response(_error(status, message), status=status)


def _chunk(name: str, told: Told) -> dict[str, Any]:
    logprobs = None
    if told.logprobs is not None:
        best = [{"token_id": token, "logprob": value, "rank": rank} for token, value, rank in told.logprobs]
        logprobs = {"content": [best[0] | {"top_logprobs": best}]}
    choice = {"index": 0, "finish_reason": told.finish, "stop_reason": told.stop, "token_ids": told.ids}
    usual = {"routed_experts": None, "sampling_mask": None, "weight_versions": None, "logprobs": logprobs}
    head = {"request_id": f"generate-tokens-{name}", "usage": None, "output_mode": "tokens"}
    return head | {"choices": [choice | usual]}


async def _write(answer: web.StreamResponse, found: dict[str, Any]) -> None:
    await answer.write(b"data: " + orjson.dumps(found) + b"\n\n")
