"""`kvfleet up`: a whole fleet on one machine, as processes.

nats-server ─▶ buckets ─▶ vaults, placement, workers, ingress ─▶ ready line ─▶ SIGINT/SIGTERM ─▶ all stopped
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvfleet.cli.console import err, fail
from kvfleet.cli.embedded import embedded_nats
from kvfleet.cli.embedded import forks as forking
from kvfleet.cli.embedded.autoscaler import LocalAutoscaler, read_limits
from kvfleet.cli.embedded.fleet import EmbeddedFleet
from kvfleet.cli.embedded.loading import FleetParts, wait_ready
from kvfleet.cli.embedded.lora_flags import read_loras
from kvfleet.cli.embedded.ports import MetricsTargets, PortTaken, claim, listen
from kvfleet.cli.embedded.processes import Child, FleetEnded, StartFailed, StopRequest, spawn
from kvfleet.cli.embedded.vllm_python import NoVllm, VllmPython, find_vllm
from kvfleet.cli.embedded.vllm_servers import VllmServers, gpus, local_model, refused
from kvfleet.cli.operator.init import create_buckets
from kvfleet.cli.operator.operator_login import Login
from kvproto.errors import InvalidRequest, KvfleetError
from kvservice import launch
from kvservice.lora_folder import LoraFolder
from kvservice.private_files import make_own_folder, read_secret, remove_own_folder, write_private

VLLM_HELP = (
    "flags of `vllm serve`, with --engine vllm. On CPUs each server takes VLLM_CPU_KVCACHE_SPACE GiB for KV blocks: 1, "
    "unless that is set"
)
DRAIN_S = 3.0

OWN_ENGINE = ("runner", "fake_tokens_per_s", "blocks", "device")  # flags for it alone

DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


def up(
    context: typer.Context,
    vllm_flags: Annotated[list[str] | None, typer.Argument(metavar="-- VLLM_FLAGS", help=VLLM_HELP)] = None,
    model: Annotated[list[str] | None, typer.Option(help="demo, a model folder or a hub id; may be repeated")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="name for clients, one per --model")] = None,
    load_format: Annotated[
        Literal["auto", "dummy"], typer.Option(help="dummy: random weights from config.json")
    ] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="workers of each model; vLLM: 1, or one a GPU")] = 2,
    autoscale: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="as many workers of each model as there is work for, instead")
    ] = None,
    target_ttft_s: Annotated[float, typer.Option(min=0.001, help="wait that --autoscale is to keep")] = 2.0,
    vaults: Annotated[int, typer.Option(min=0, help="processes that keep KV blocks for all workers")] = 1,
    vault_max_bytes: Annotated[int | None, typer.Option(min=1, help="memory of each vault for blocks")] = None,
    placements: Annotated[int, typer.Option(min=0, help="placement replicas")] = 1,
    host: Annotated[str, typer.Option(help="address of the HTTP endpoint")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8080,
    nats_url: Annotated[str | None, typer.Option(help="use these servers instead of an embedded one")] = None,
    nats_user: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_USER", help="user for --nats-url")] = None,
    nats_password: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_PASSWORD", help="its password")] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="who may use the HTTP endpoint (README)")] = None,
    policy: Annotated[str, typer.Option(help="placement policy")] = "cost",
    state_dir: Annotated[Path | None, typer.Option(help="keep NATS's files here; default: a temporary folder")] = None,
    dtype: Annotated[DType, typer.Option()] = "auto",
    device: Annotated[Device, typer.Option()] = "auto",
    runner: Annotated[
        Literal["torch", "fake"], typer.Option(help="fake: deterministic and without torch, for tests")
    ] = "torch",
    engine: Annotated[
        Literal["own", "vllm"], typer.Option(help="vllm: each worker beside a vLLM server, started with it")
    ] = "own",
    engine_python: Annotated[
        Path | None, typer.Option(help="Python that has vLLM; default: that of make vllm-install, or this one")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="a LoRA adapter of the model, for --engine vllm; may be repeated"),
    ] = None,
    fake_tokens_per_s: Annotated[float, typer.Option(min=0, help="speed of the fake runner; 0: unlimited")] = 0.0,
    blocks: Annotated[int | None, typer.Option(min=2, help="KV blocks of each worker")] = None,
    namespace: Annotated[str, typer.Option(help="first token of every subject")] = "kvf",
    log_level: Annotated[str, typer.Option()] = "warning",
    otlp_endpoint: Annotated[str | None, typer.Option(help="OpenTelemetry collector to send spans to")] = None,
    metrics_port_base: Annotated[
        int | None, typer.Option(min=0, max=65000, help="first port for metrics, one a process; 0: any free ones")
    ] = None,
) -> None:
    """Start a fleet on this machine; prints `ready http://HOST:PORT` when a request would be served."""
    models = model or ["demo"]
    names = served_model_name or []
    if names and len(names) != len(models):
        fail(f"--served-model-name: {len(names)} names for {len(models)} models", 2)
    for one in models:
        if one != "demo" and (one.startswith((".", "/", "~")) or one.count("/") != 1) and not Path(one).is_dir():
            fail(f"model folder {one!r} does not exist")
    loras = _loras(lora, engine, models, names) if lora else {}
    vllm = None
    if engine == "vllm":
        vllm = _vllm(context, engine_python, vllm_flags or [])
        if _is_default(context, "workers"):
            workers = max(1, len(gpus()) // len(models))
    elif vllm_flags or engine_python is not None:
        fail(f"{vllm_flags[0] if vllm_flags else '--engine-python'}: only with --engine vllm", 2)
    limits = read_limits(autoscale)
    if limits is not None and not placements:
        fail("--autoscale needs a placement: it says how many workers there should be", 2)
    try:
        listener = listen(host, port)
    except PortTaken as error:
        fail(str(error))
    port = listener.getsockname()[1]
    targets = MetricsTargets(metrics_port_base, lambda wanted: claim("127.0.0.1", wanted))
    stopping = StopRequest()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())

    with folders(state_dir) as (own_folder, state):
        fleet = EmbeddedFleet(listener)
        try:
            login, system = _start_nats(fleet, state, nats_url, nats_user, nats_password)
            for line in asyncio.run(create_buckets(login, namespace)):
                err.print(line)
            url = login.url
            common = [f"--nats-url={url}", f"--namespace={namespace}", f"--log-level={log_level}"]
            common += [f"--otlp-endpoint={otlp_endpoint}"] if otlp_endpoint else []
            every = login.variables() | {"TMPDIR": str(own_folder)}  # removed with the fleet, also after a kill
            key = every | {"KVFLEET_FLEET_KEY": os.environ.get("KVFLEET_FLEET_KEY") or fleet_key(state)}
            room = [f"--max-bytes={vault_max_bytes}"] if vault_max_bytes else [f"--vaults-on-host={vaults}"]
            for i in range(vaults):
                own = [*room, *targets.flags("vault", f"v{i}")]
                fleet.vaults.append(_service("vault", f"v{i}", [*common, *own], every))
            served = names or [_name(one) for one in models]
            deciding = [*common, f"--policy={policy}", f"--models={','.join(served)}"]
            if limits is not None:
                deciding += [f"--min-replicas={limits.minimum}", f"--max-replicas={limits.maximum}"]
                deciding.append(f"--target-ttft-s={target_ttft_s}")
            for i in range(placements):
                own = [*deciding, *targets.flags("placement", f"p{i}")]
                fleet.placements.append(_service("placement", f"p{i}", own, key | system))
            flags = [f"--engine={engine}", f"--load-format={load_format}", f"--dtype={dtype}", f"--device={device}"]
            flags += [f"--runner={runner}", f"--fake-tokens-per-s={fake_tokens_per_s}", f"--drain-s={DRAIN_S}"]
            flags += [f"--blocks={blocks}"] if blocks else []
            total = (limits.minimum if limits else workers) * len(models)
            most = (limits.maximum if limits else workers) * len(models)
            numbers = itertools.count()
            servers = None
            if vllm is not None:
                options = [f"--load-format={load_format}", f"--dtype={dtype}"]
                servers = VllmServers(vllm, own_folder, state, vllm_flags or [], options, most, log_level, loras)

            def start_worker(which: int, *, late: bool = False) -> Child:
                i = next(numbers)
                own = [*common, *flags, f"--model={models[which]}", f"--workers-on-host={most}"]
                own += targets.flags("worker", f"w{i}", or_any=late)
                own += [f"--served-model-name={names[which]}"] if which < len(names) else []
                beside = None
                if servers is not None:
                    beside, at = servers.start(f"w{i}", models[which], served[which], _own_gpu(i))
                    own += [f"--engine-url={at}", *servers.worker_flags()]
                uses_torch = runner == "torch" and servers is None
                child = _service("worker", f"w{i}", own, key | _own_gpu(i), torch=uses_torch)
                child.model, child.engine = served[which], beside
                return child

            fleet.workers += [start_worker(i % len(models)) for i in range(total)]
            front = [*common, f"--host={host}", f"--port={port}", f"--listen-fd={listener.fileno()}"]
            front.append(f"--drain-s={DRAIN_S}")
            front += [f"--api-keys-file={api_keys_file}"] if api_keys_file else []
            front += targets.flags("ingress", "i0", f"[{host}]" if ":" in host else host)
            fleet.ingresses.append(_service("ingress", "i0", front, key, listener.fileno()))
            base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            if wait_ready(fleet, base, FleetParts(total, placements, vaults), login, namespace, stopping):
                if (listed := targets.write(state)) is not None:
                    err.print(f"metrics: Prometheus finds every process by {listed}")
                sys.stdout.write(f"ready {base}\n")
                sys.stdout.flush()
                _hint(base, url, names[0] if names else _name(models[0]), chats=_chats(models[0]))

                def list_again() -> None:
                    try:
                        targets.write(state)
                    except OSError as error:  # the fleet goes on without
                        err.print(f"kvfleet: what Prometheus reads was not written: {error}")

                def forget(worker: Child) -> None:
                    targets.forget("worker", worker.name)
                    list_again()

                def grow(one: str) -> Child:
                    child = start_worker(served.index(one), late=True)
                    list_again()
                    return child

                decides, none = limits is not None, limits is not None and not limits.minimum
                scaler = LocalAutoscaler(
                    login, namespace, served, grow, fleet.workers, placement_decides=decides, may_be_none=none
                )
                fleet.autoscaler = scaler
                scaler.thread.start()
                fleet.watch(stopping, forget)
        except (StartFailed, FleetEnded, KvfleetError, PortTaken) as error:
            fleet.stop()
            fail(str(error))
        finally:
            fleet.stop()


@contextmanager
def folders(state_dir: Path | None) -> Iterator[tuple[Path, Path]]:
    """One for the processes' temporary files, removed at the end, and one for the fleet's state: the user's, which
    stays, or the same."""
    if state_dir is not None:
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"cannot use --state-dir {state_dir}: {error.strerror}")
    try:
        own = make_own_folder()
    except OSError as error:
        fail(f"cannot make a temporary folder: {error}")
    try:
        yield own, own if state_dir is None else state_dir.resolve()
    finally:
        remove_own_folder(own)


def fleet_key(state: Path) -> str:
    """The secret of cache salts and request ids, the same after a restart. Raises InvalidRequest for an empty file or
    an unreadable one."""
    path = state / "fleet.key"
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode())
    return read_secret(path, "state_dir")


def _vllm(context: typer.Context, python: Path | None, flags: list[str]) -> VllmPython:
    """Fails in one line."""
    for name in OWN_ENGINE:
        if not _is_default(context, name):
            fail(f"--{name.replace('_', '-')}: not with --engine vllm", 2)
    if (ours := refused(flags)) is not None:
        fail(f"{ours}: kvfleet up gives vLLM its own{', of each --lora' if ours == '--lora-modules' else ''}", 2)
    try:
        return find_vllm(python)
    except NoVllm as error:
        fail(str(error))


def _loras(given: list[str], engine: str, models: list[str], names: list[str]) -> dict[str, LoraFolder]:
    """Fails in one line."""
    if engine != "vllm":
        fail(f"--lora {given[0]}: the own engine has no adapters: only with --engine vllm", 2)
    if len(models) > 1:
        fail("--lora: with one --model only", 2)
    try:
        return read_loras(given, local_model(models[0]), names[0] if names else _name(models[0]))
    except InvalidRequest as error:
        fail(f"--lora: {error}")


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def _name(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model


def _start_nats(
    fleet: EmbeddedFleet, state: Path, url: str | None, user: str | None, password: str | None
) -> tuple[Login, dict[str, str]]:
    """The login of the fleet's processes, and the variables for placement's second connection."""
    if url is not None:
        return Login(url, user, (password or "") if user is not None else None), {}
    server = embedded_nats.start(state, state / "nats-server.log")
    fleet.nats.append(server.child)
    return server.login, server.system


def _service(
    service: str, member: str, flags: list[str], env: dict[str, str], fd: int | None = None, *, torch: bool = False
) -> Child:
    """`fd`: a socket that it inherits. `torch`: it imports torch."""
    module, own = f"kvfleet.{service}.main", [f"--id={member}", *flags]
    if forking.available:
        forks = forking.of_workers() if torch else forking.of_services()
        return Child(member, lambda: forks.start(module, own, env, fd))
    command = launch.command(module, *own, f"--parent-pid={os.getpid()}")
    return spawn(member, command, env, [] if fd is None else [fd])


def _own_gpu(index: int) -> dict[str, str]:
    """Local workers take the GPUs round robin."""
    return {"CUDA_VISIBLE_DEVICES": found[index % len(found)]} if (found := gpus()) else {}


def _chats(model: str) -> bool:
    """Whether the model has a chat template. A model that is no local folder is assumed to."""
    folder = Path(model)
    if not folder.is_dir():
        return True
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").exists() or (config.exists() and '"chat_template"' in config.read_text())


def _hint(base: str, nats_url: str, model: str, *, chats: bool) -> None:
    route, ask = "/v1/completions", '"prompt": "Once upon a time"'
    if chats:
        route, ask = "/v1/chat/completions", '"messages": [{"role": "user", "content": "Who goes there?"}]'
    body = f'{{"model": "{model}", "stream": true, {ask}}}'
    err.print(f"\nTry:\n  curl -N {base}{route} -H 'Content-Type: application/json' \\")
    err.print(f"    -d '{body}'")
    if chats:
        err.print(f"  {_own_command()} chat --url {base}")
    err.print(f"NATS is at {nats_url}. Ctrl-C stops everything.\n")


def _own_command() -> str:
    if shutil.which("kvfleet"):
        return "kvfleet"
    beside = Path(sys.executable).with_name("kvfleet")
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)
