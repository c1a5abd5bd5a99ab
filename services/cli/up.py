"""`kvfleet up`: a whole fleet on one machine, as processes.

nats-server ─▶ buckets ─▶ placement, workers, ingress ─▶ ready line ─▶ SIGINT/SIGTERM ─▶ all stopped
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.status import Status

from kvproto.errors import KvfleetError
from services.cli import embedded_nats
from services.cli.console import err, fail
from services.cli.init import create_buckets
from services.cli.processes import Child, StartFailed, spawn, stop

STOP_WITHIN_S = 9.0
DRAIN_S = 3.0
START_TIMEOUT_S = 600.0


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Runner(StrEnum):
    torch = "torch"
    fake = "fake"


@dataclass
class Fleet:
    """The processes of one embedded fleet. Owned by `up`."""

    nats: list[Child] = field(default_factory=list)
    placements: list[Child] = field(default_factory=list)
    workers: list[Child] = field(default_factory=list)
    ingresses: list[Child] = field(default_factory=list)

    def __iter__(self) -> Iterator[Child]:
        yield from (*self.nats, *self.placements, *self.workers, *self.ingresses)

    def stop(self) -> None:
        stop((self.ingresses, self.workers, self.placements, self.nats), STOP_WITHIN_S)


def up(
    model: Annotated[list[str] | None, typer.Option(help="demo, a model folder or a hub id; may be repeated")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="name for clients, one per --model")] = None,
    load_format: Annotated[LoadFormat, typer.Option(help="dummy: random weights from config.json")] = LoadFormat.auto,
    workers: Annotated[int, typer.Option(min=1, help="workers of each model")] = 2,
    placements: Annotated[int, typer.Option(min=0, help="placement replicas")] = 1,
    host: Annotated[str, typer.Option(help="address of the HTTP endpoint")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8080,
    nats_url: Annotated[str | None, typer.Option(help="use these servers instead of an embedded one")] = None,
    policy: Annotated[str, typer.Option(help="placement policy")] = "bounded_ring",
    state_dir: Annotated[Path | None, typer.Option(help="keep NATS's files here; default: a temporary folder")] = None,
    dtype: Annotated[DType, typer.Option()] = DType.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    runner: Annotated[Runner, typer.Option(help="fake: deterministic and without torch, for tests")] = Runner.torch,
    fake_tokens_per_s: Annotated[float, typer.Option(min=0, help="speed of the fake runner; 0: unlimited")] = 0.0,
    blocks: Annotated[int | None, typer.Option(min=2, help="KV blocks of each worker")] = None,
    namespace: Annotated[str, typer.Option(help="first token of every subject")] = "kvf",
    log_level: Annotated[str, typer.Option()] = "warning",
) -> None:
    """Start a fleet on this machine; prints `ready http://HOST:PORT` when a request would be served."""
    models = model or ["demo"]
    names = served_model_name or []
    if len(names) > len(models):
        fail("--served-model-name: more names than models", 2)
    for one in models:
        if one != "demo" and (one.startswith((".", "/", "~")) or one.count("/") != 1) and not Path(one).is_dir():
            fail(f"model folder {one!r} does not exist")
    port = _claim_port(host, port)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())

    with _state(state_dir) as state:
        fleet = Fleet()
        try:
            url, system = _start_nats(fleet, state, nats_url, namespace, stopping)
            common = [f"--nats-url={url}", f"--namespace={namespace}", f"--log-level={log_level}"]
            common.append(f"--parent-pid={os.getpid()}")
            for i in range(placements):
                fleet.placements.append(_service("placement", f"p{i}", [*common, f"--policy={policy}"], system))
            flags = [f"--load-format={load_format.value}", f"--dtype={dtype.value}", f"--device={device.value}"]
            flags += [f"--runner={runner.value}", f"--fake-tokens-per-s={fake_tokens_per_s}", f"--drain-s={DRAIN_S}"]
            flags += [f"--blocks={blocks}"] if blocks else []
            total = workers * len(models)
            key = {"KVFLEET_FLEET_KEY": os.environ.get("KVFLEET_FLEET_KEY") or _fleet_key(state)}
            for i in range(total):
                which = i % len(models)
                own = [f"--model={models[which]}", f"--workers-on-host={total}"]
                own += [f"--served-model-name={names[which]}"] if which < len(names) else []
                fleet.workers.append(_service("worker", f"w{i}", [*common, *flags, *own], key | _own_gpu(i)))
            fleet.ingresses.append(_service("ingress", "i0", [*common, f"--host={host}", f"--port={port}"], {}))
            base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            if _wait_ready(fleet, base, total, placements, stopping):
                sys.stdout.write(f"ready {base}\n")
                sys.stdout.flush()
                _hint(base, url, names[0] if names else _name(models[0]))
                _watch(fleet, stopping)
        except (StartFailed, KvfleetError) as error:
            fleet.stop()
            fail(str(error))
        finally:
            fleet.stop()


def _name(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model


def _claim_port(host: str, port: int) -> int:
    """Fail early and clearly if the port is taken; choose a free one for 0."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        fail(f"cannot listen on {host}:{port}: {error.strerror or error}")


@contextmanager
def _state(state_dir: Path | None) -> Iterator[Path]:
    """A folder for the fleet's files: the user's, which stays, or a temporary one, which goes."""
    if state_dir is not None:
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"cannot use --state-dir {state_dir}: {error.strerror}")
        yield state_dir.resolve()
        return
    temporary = Path(tempfile.mkdtemp(prefix="kvfleet-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fleet_key(state: Path) -> str:
    """The secret of the tenants' cache salts, kept with the state so that it outlives a restart."""
    path = state / "fleet.key"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(32))
    return path.read_text().strip()


def _start_nats(
    fleet: Fleet, state: Path, nats_url: str | None, namespace: str, stopping: threading.Event
) -> tuple[str, dict[str, str]]:
    system: dict[str, str] = {}
    if nats_url is None:
        server = embedded_nats.start(state, state / "nats-server.log")
        fleet.nats.append(server.child)
        nats_url = server.url
        system = {
            "KVFLEET_SYSTEM_USER": server.system_user,
            "KVFLEET_SYSTEM_PASSWORD": server.system_password,
        }
    for line in asyncio.run(create_buckets(nats_url, namespace)):
        err.print(line, markup=False)
    return nats_url, system


def _service(service: str, member: str, flags: list[str], env: dict[str, str]) -> Child:
    return spawn(member, [sys.executable, "-m", f"services.{service}.main", f"--id={member}", *flags], env)


def _own_gpu(index: int) -> dict[str, str]:
    """Each local worker takes its own GPU, round robin, where there are any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu.strip()]
    else:
        gpus = [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}


def _wait_ready(fleet: Fleet, base: str, workers: int, placements: int, stopping: threading.Event) -> bool:
    """Until every process serves. Raises StartFailed naming one that ended; False if asked to stop meanwhile."""
    end = time.monotonic() + START_TIMEOUT_S
    shown = ""
    with Status("starting", console=err) as status, httpx.Client(base_url=base, timeout=2.0, trust_env=False) as http:
        while not stopping.is_set():
            for child in fleet:
                if not child.running:
                    raise StartFailed(child.name, f"it ended with code {child.process.returncode}; see its line above")
            if time.monotonic() > end:
                raise StartFailed("the fleet", f"not ready within {START_TIMEOUT_S:.0f} s")
            ready = _ready_workers(http)
            line = f"loading: {ready} of {workers} workers ready"
            status.update(line)
            if line != shown and not err.is_terminal:
                err.print(line, markup=False)
            shown = line
            if ready >= workers and _is_ready(http, placements):
                return True
            stopping.wait(0.1)
    return False


def _ready_workers(http: httpx.Client) -> int:
    try:
        listed: dict[str, Any] = http.get("/workers").json()
        return sum(1 for worker in listed.values() if worker["state"] == "ready")
    except (httpx.HTTPError, ValueError, KeyError, AttributeError, TypeError):
        return 0


def _is_ready(http: httpx.Client, placements: int) -> bool:
    try:
        stats = http.get("/stats").json()
        return http.get("/readyz").status_code == 200 and stats["placements"] >= placements
    except (httpx.HTTPError, ValueError, KeyError):
        return False


def _hint(base: str, nats_url: str, model: str) -> None:
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Who goes there?"}}]}}'
    err.print(f"\nTry:\n  curl -N {base}/v1/chat/completions -H 'Content-Type: application/json' \\", markup=False)
    err.print(f"    -d '{body}'", markup=False)
    err.print(f"  {_own_command()} chat --url {base}\nNATS is at {nats_url}. Ctrl-C stops everything.\n", markup=False)


def _own_command() -> str:
    """How to call this command from here: its name if it is on PATH, else its path."""
    if shutil.which("kvfleet"):
        return "kvfleet"
    beside = Path(sys.executable).with_name("kvfleet")
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


def _watch(fleet: Fleet, stopping: threading.Event) -> None:
    """Until asked to stop. A lost worker or placement is said once: the fleet goes on with the others."""
    while not stopping.wait(0.2):
        for child in fleet:
            if child.running or child.noticed:
                continue
            child.noticed = True
            code = child.process.returncode
            if child in fleet.nats or child in fleet.ingresses:
                raise StartFailed(child.name, f"it ended with code {code} while the fleet was running")
            err.print(f"kvfleet: {child.name} ended with code {code}; the fleet goes on without it", markup=False)
