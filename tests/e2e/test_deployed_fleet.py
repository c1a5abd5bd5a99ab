"""Single processes under deploy/nats's roles, as in production: keys, tenants, and what breaks when a part does."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest

from kvproto.client import Client, Generation
from kvproto.errors import KvfleetError
from kvproto.messages import Finished, Sampling, Tokens
from kvproto.testing.fixtures import ConfiguredNats
from tests.support.native_stream import Streamed, native_stream
from tests.support.processes import Deployment
from tests.support.waiting import LIMIT_S

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
USERS = {
    "KVF_ADMIN_PASSWORD": "admin",
    "KVF_INGRESS_PASSWORD": "ingress",
    "KVF_PLACEMENT_PASSWORD": "placement",
    "KVF_WORKER_PASSWORD": "worker",
    "KVF_VAULT_PASSWORD": "vault",
    "KVF_PRODUCER_public_PASSWORD": "producer-public",
    "KVF_SYS_PASSWORD": "sys",
}
KEY, OTHER_KEY = "sk-public", "sk-acme"
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def fleet(nats_with_config: ConfiguredNats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    passwords = {user: f"secret-of-{user}" for user in USERS.values()}
    server = nats_with_config(DEPLOY / "nats-server.conf", {name: passwords[user] for name, user in USERS.items()})
    fleet = Deployment(server.url, tmp_path_factory.mktemp("deployed"), passwords)
    keys = [
        {"name": "public", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "public", "admin": True},
        {"name": "acme", "sha256": hashlib.sha256(OTHER_KEY.encode()).hexdigest(), "tenant": "acme"},
    ]
    fleet.headers = AUTH
    fleet.init()
    fleet.start("placement", "p0")
    fleet.start("vault", "v0", "--max-bytes=67108864")
    fleet.start_worker("w0")
    fleet.start_worker("w1")
    fleet.start("ingress", "i0", f"--port={fleet.port}", env={"KVFLEET_API_KEYS": json.dumps({"keys": keys})})
    try:
        fleet.wait_ready(2)
        yield fleet
    finally:
        fleet.stop()


def stream(fleet: Deployment, body: dict[str, Any], on_token: Any = None) -> Streamed:
    return native_stream(fleet.base, body, AUTH, on_token)


def asked(prompt: str, count: int = 100) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}


def test_keys_and_tenants(fleet: Deployment) -> None:
    body = asked("who may", 5)
    assert httpx.post(f"{fleet.base}/generate", json=body).status_code == 401
    wrong = httpx.post(f"{fleet.base}/generate", json=body, headers={"Authorization": "Bearer nope"})
    assert wrong.status_code == 401
    assert "nope" not in wrong.text
    assert httpx.post(f"{fleet.base}/generate", json={**body, "seq_id": "mine"}, headers=AUTH).status_code == 200
    other = {"Authorization": f"Bearer {OTHER_KEY}"}
    assert httpx.get(f"{fleet.base}/sessions/mine", headers=AUTH).status_code == 200
    assert httpx.get(f"{fleet.base}/sessions/mine", headers=other).status_code == 404
    assert httpx.get(f"{fleet.base}/sessions/mine/kv?layer=0", headers=other).status_code in (403, 404)
    assert "secret-of" not in fleet.logs()
    assert KEY not in fleet.logs()


def test_workers_reach_the_vault(fleet: Deployment) -> None:
    """Under their roles they read the data plane's key and prove it. One another they meet when a request names one
    (`test_hand_over`)."""
    end = time.monotonic() + LIMIT_S
    while True:
        listed = httpx.get(f"{fleet.base}/workers", headers=AUTH).json()
        rates = [worker["rates"]["restore_bytes_per_s"] for worker in listed.values()]
        if all({"host", "vault"} <= set(measured) for measured in rates):
            break
        assert time.monotonic() < end, (rates, fleet.logs())
        time.sleep(0.2)
    assert httpx.get(f"{fleet.base}/health").json()["vaults"] == 1
    assert "ermissions" not in fleet.logs()


async def test_a_bare_producer_of_one_tenant(fleet: Deployment) -> None:
    assert fleet.passwords is not None
    prefix = b"_prd.public.test"
    nc = await nats.connect(
        fleet.nats_url,
        user="producer-public",
        password=fleet.passwords["producer-public"],
        inbox_prefix=prefix,
        error_cb=_ignore,
    )
    frames: list[dict[str, Any]] = []

    async def on_frame(message: Any) -> None:
        frames.append(json.loads(message.data))

    inbox = nc.new_inbox()
    await nc.subscribe(inbox, cb=on_frame)
    body = json.dumps({"prompt": "bare", "max_tokens": 30, "ignore_eos": True}).encode()
    header = {"Content-Type": "application/json"}
    for tenant in ("acme", "public"):  # the first is another tenant's: NATS itself refuses
        await nc.publish(f"kvf.generate.{tenant}.demo", body, reply=inbox, headers=header)
    async with asyncio.timeout(LIMIT_S):
        while not frames or frames[-1]["type"] != "finished":
            await asyncio.sleep(0.02)
    # A worker that accepts late is cancelled, and its frames are of an older attempt: those are dropped.
    told = [frame for frame in frames if frame["attempt"] == frames[-1]["attempt"]]
    assert sum(frame["type"] == "started" for frame in told) == 1
    assert [frame["index"] + at for frame in told if frame["type"] == "tokens" for at in range(len(frame["ids"]))] == [
        *range(30)
    ]
    assert frames[-1]["output_tokens"] == 30
    await nc.close()


async def _ignore(error: Exception) -> None:
    pass


async def test_the_client_as_a_producer(fleet: Deployment) -> None:
    assert fleet.passwords is not None
    options = {"user": "producer-public", "password": fleet.passwords["producer-public"]}
    async with await Client.open(fleet.nats_url, **options) as client:
        sampling = Sampling(20, temperature=0, ignore_eos=True)
        # By name: a busy placement is waited for.
        async with client.generate(Generation("demo", sampling, (1, 2, 3), policy="cost")) as events:
            kinds = [type(event) async for event in events]
        assert kinds.count(Tokens) >= 1
        assert kinds[-1] is Finished
        assert client.counters.placed_total == 1, "placement answered"
        with pytest.raises(KvfleetError):
            async with client.generate(Generation("demo", sampling, (1, 2, 3), tenant="acme", deadline_s=3)) as events:
                _ = [event async for event in events]


def test_killed_worker_with_the_system_account_is_noticed_at_once(fleet: Deployment) -> None:
    whole, *_ = stream(fleet, asked("the king is"))

    def kill(worker: str, count: int) -> None:
        if count == 20 and not killed:
            killed.append(worker)
            fleet.services[worker].kill()

    killed: list[str] = []
    ids, times, end = stream(fleet, asked("the king is"), kill)
    assert killed
    assert end["type"] == "done"
    assert ids == whole
    gap = max(b - a for a, b in itertools.pairwise(times))
    print(f"gap {gap:.2f} s")
    assert gap < 2.0, "DISCONNECT, ping, record dropped, resumed: sooner than its record expires"
    fleet.start_worker(killed[0])
    fleet.wait_ready(2)


def test_a_hung_worker_is_left_and_fenced(fleet: Deployment) -> None:
    whole, *_ = stream(fleet, asked("a horse, a horse", 300))

    def hang(worker: str, count: int) -> None:
        if count == 20 and not hung:
            hung.append(worker)
            os.kill(fleet.services[worker].pid, signal.SIGSTOP)
        if count == 200 and hung and len(hung) == 1:  # it wakes while its old stream goes on elsewhere
            hung.append("woken")
            os.kill(fleet.services[hung[0]].pid, signal.SIGCONT)

    hung: list[str] = []
    ids, times, end = stream(fleet, asked("a horse, a horse", 300), hang)
    assert len(hung) == 2
    assert end["type"] == "done"
    assert ids == whole, "every token once, none of the woken worker's"
    gap = max(b - a for a, b in itertools.pairwise(times))
    print(f"gap {gap:.2f} s")
    assert gap < 3.5
    fleet.wait_ready(2)


async def test_a_bare_producers_lost_worker_is_told_within_four_seconds(fleet: Deployment) -> None:
    assert fleet.passwords is not None
    nc = await nats.connect(
        fleet.nats_url,
        user="producer-public",
        password=fleet.passwords["producer-public"],
        inbox_prefix=b"_prd.public.lost",
    )
    inbox = nc.new_inbox()
    frames: list[dict[str, Any]] = []

    async def on_frame(message: Any) -> None:
        frames.append(json.loads(message.data))

    await nc.subscribe(inbox, cb=on_frame)
    body = json.dumps({"prompt": "lost", "max_tokens": 1000, "ignore_eos": True}).encode()
    await nc.publish("kvf.generate.public.demo", body, reply=inbox, headers={"Content-Type": "application/json"})
    async with asyncio.timeout(LIMIT_S):
        while sum(frame["type"] == "tokens" for frame in frames) < 10:
            await asyncio.sleep(0.01)
    worker = frames[0]["worker"]
    fleet.services[worker].kill()
    async with asyncio.timeout(4):
        while frames[-1]["type"] != "failed":
            await asyncio.sleep(0.01)
    assert frames[-1]["retryable"] is True
    await asyncio.sleep(0.5)
    assert sum(frame["type"] in ("failed", "finished") for frame in frames) == 1
    await nc.close()
    fleet.start_worker(worker)
    await asyncio.to_thread(fleet.wait_ready, 2)


def test_without_placement_the_ring_places(fleet: Deployment) -> None:
    fleet.services["p0"].kill()
    ids, *_ = stream(fleet, asked("no placement", 20))
    assert len(ids) == 20
    stats = httpx.get(f"{fleet.base}/stats", headers=AUTH).json()["ingress"]
    assert stats["placement_fallbacks_total"] >= 1
    fleet.start("placement", "p0")
    end = time.monotonic() + LIMIT_S
    while httpx.get(f"{fleet.base}/stats", headers=AUTH).json()["ingress"]["placed_total"] == stats["placed_total"]:
        stream(fleet, asked("placed again", 2))
        assert time.monotonic() < end, "a placement that came back is asked again"


def test_zz_everything_stops_cleanly(fleet: Deployment) -> None:
    for name in ("i0", "w0", "w1", "p0"):
        assert fleet.services[name].stop() == 0, (name, fleet.logs())
    assert "Traceback" not in fleet.logs(), fleet.logs()
