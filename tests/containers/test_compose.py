"""deploy/docker/compose.yaml as it runs: healthy, confined, serving, and a worker's container may be killed."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.containers.compose_fleet import ComposeFleet, greedy, service_of
from tests.containers.confinement import check_found, check_told

RUNNING = {"nats": 1, "placement": 2, "vault": 1, "worker": 2, "ingress": 1}
SERVICES = [f"{name}-{number}" for name, count in RUNNING.items() for number in range(1, count + 1)]
TOKENS = 600
KILL_AT = 15


def named(compose: ComposeFleet, name: str) -> Any:
    return next(one for one in compose.containers() if one.name.endswith(f"-{name}"))


def run_inside(container: Any, program: str) -> str:
    code, (output, errors) = container.exec_run(["python", "-c", program], demux=True)
    assert code == 0, errors
    return str(output.decode())


def test_everything_is_up_and_healthy(compose: ComposeFleet) -> None:
    found = compose.containers()
    running = [one for one in found if one.status == "running"]
    assert Counter(service_of(one) for one in running) == RUNNING
    assert {one.attrs["State"]["Health"]["Status"] for one in running} == {"healthy"}
    (init,) = compose.containers("init")
    assert init.attrs["State"]["ExitCode"] == 0
    assert "are ready" in init.logs().decode()
    assert httpx.get(f"{compose.base}/readyz").status_code == 200
    health = httpx.get(f"{compose.base}/health").json()
    assert (health["placements"], health["vaults"]) == (2, 1)
    assert len(compose.ready_workers()) == 2


@pytest.mark.parametrize("name", SERVICES)
def test_it_is_read_only_non_root_and_without_capabilities(compose: ComposeFleet, name: str) -> None:
    container = named(compose, name)
    check_told(container.attrs)
    check_found(lambda program: run_inside(container, program))


def test_the_job_was_confined_too(compose: ComposeFleet) -> None:
    (init,) = compose.containers("init")
    check_told(init.attrs)


@pytest.mark.parametrize("name", ["worker-1", "nats-1"])
def test_the_health_check_says_what_is_so(compose: ComposeFleet, name: str) -> None:
    container = named(compose, name)
    check = container.attrs["Config"]["Healthcheck"]["Test"][1:]
    assert container.exec_run(check).exit_code == 0
    elsewhere = container.exec_run(["python", "-m", "kvservice.health", "--port", "9", "--path", "/readyz"])
    assert elsewhere.exit_code == 1
    assert b"no answer" in elsewhere.output


def test_only_loopback_reaches_in(compose: ComposeFleet) -> None:
    for container in compose.containers():
        bound = [one for ports in container.attrs["NetworkSettings"]["Ports"].values() for one in ports or []]
        if service_of(container) == "ingress":
            assert [one["HostIp"] for one in bound] == ["127.0.0.1"]
        else:
            assert bound == []


def test_nats_hears_nobody_without_a_certificate_and_a_key(compose: ComposeFleet) -> None:
    """From a container of the fleet's network, which has both."""
    program = """
import asyncio, nats, ssl
async def attempt(with_certificate):
    tls = ssl.create_default_context(cafile="/run/secrets/ca.crt")
    if with_certificate:
        tls.load_cert_chain("/run/secrets/node.crt", "/run/secrets/node.key")
    async def quiet(error):
        pass
    try:
        await nats.connect("tls://nats:4222", tls=tls, error_cb=quiet, allow_reconnect=False, connect_timeout=10)
    except Exception as error:
        return f"refused: {error}"
    return "let in"
print(asyncio.run(attempt(False)))
print(asyncio.run(attempt(True)))
"""
    stranger, nobody = run_inside(named(compose, "placement-1"), program).splitlines()
    assert stranger.startswith("refused")
    assert "uthorization" in nobody


def test_a_key_is_needed(compose: ComposeFleet) -> None:
    body = {"prompt": "who goes there", "max_tokens": 2}
    assert httpx.post(f"{compose.base}/generate", json=body).status_code == 401
    assert httpx.post(f"{compose.base}/generate", json=body, headers=compose.headers).status_code == 200


def test_the_page_is_in_the_image(compose: ComposeFleet) -> None:
    page = httpx.get(f"{compose.base}/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    linked = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
    assert len(linked) == 2
    for path in linked:
        assert httpx.get(f"{compose.base}/{path}").status_code == 200


def test_a_chat_brings_tokens(compose: ComposeFleet) -> None:
    with OpenAI(base_url=f"{compose.base}/v1", api_key=compose.api_key) as client:
        (model,) = client.models.list().data
        messages = [{"role": "user", "content": "Who are you?"}]
        chunks = list(
            client.chat.completions.create(
                model=model.id,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


def test_a_killed_worker_loses_nothing(compose: ComposeFleet) -> None:
    prompt = "Once more unto the breach, dear friends"
    whole, end = greedy(compose.base, prompt, TOKENS, compose.headers)
    assert end["type"] == "done"
    assert len(whole) == TOKENS
    lost = compose.stats()["lost_attempts_total"]
    killed: list[Any] = []

    def kill(worker: str, count: int) -> None:
        if count == KILL_AT:
            killed.append(compose.worker_container(worker))
            killed[0].kill()

    ids, disturbed = greedy(compose.base, prompt, TOKENS, compose.headers, kill)
    killed[0].reload()
    assert killed[0].status == "exited"
    assert killed[0].attrs["State"]["ExitCode"] == 137
    assert disturbed["type"] == "done", disturbed
    assert ids == whole, "every token once, and the same ones"
    assert disturbed["generated_text"] == end["generated_text"]
    assert compose.stats()["lost_attempts_total"] == lost + 1, "it was killed in the middle of it"
    killed[0].start()
    compose.wait(lambda: len(compose.ready_workers()) == 2, 120, killed[0].logs(tail=20).decode())


def test_nothing_secret_is_in_the_logs(compose: ComposeFleet) -> None:
    for container in compose.containers():
        text = container.logs().decode()
        assert compose.api_key not in text
        assert "PRIVATE KEY" not in text
        assert "Traceback" not in text, container.name
        if service_of(container) in ("worker", "ingress", "placement", "vault"):
            assert all(json.loads(line) for line in text.splitlines() if line.startswith("{"))
