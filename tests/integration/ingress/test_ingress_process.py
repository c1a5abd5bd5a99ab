"""An ingress as a process: keys of a mounted secret, SIGHUP, TLS, its second port, and no key in anything it writes."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_process import IngressProcess, write_certificate
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvproto.subjects import Subjects
from kvproto.testing.nats_process import free_port
from tests.support.local_issuer import LocalIssuer, token
from tests.support.waiting import LIMIT_S, until


def entries(*names: str, **more: Any) -> str:
    return json.dumps([{"name": name, "sha256": hash_key(f"kvf_{name}"), "admin": True, **more} for name in names])


def mount(folder: Path, version: str, text: str) -> None:
    """As Kubernetes writes a secret."""
    (folder / f"..{version}").mkdir(parents=True)
    (folder / f"..{version}" / "api-keys.json").write_text(text)
    if not (folder / "api-keys.json").is_symlink():
        (folder / "api-keys.json").symlink_to(Path("..data") / "api-keys.json")
    (folder / "..tmp").symlink_to(f"..{version}")
    os.replace(folder / "..tmp", folder / "..data")


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client:
        yield client


async def test_keys_come_and_go_while_streams_run(
    nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    secret, audit = tmp_path / "secret", tmp_path / "audit.jsonl"
    mount(secret, "v1", entries("one"))
    port, metrics = free_port(), free_port()
    process = IngressProcess(
        nats_url,
        fleet_buckets,
        tmp_path,
        port=port,
        metrics_port=metrics,
        api_keys_file=secret / "api-keys.json",
        api_keys=entries("fixed"),
        audit_log=audit,
        log_format="json",
    )
    base = f"http://127.0.0.1:{port}"

    async def status(key: str) -> int:
        return (await http.get(f"{base}/v1/models", headers={"x-api-key": f"kvf_{key}"})).status_code

    async def becomes(key: str, expected: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while await status(key) != expected:
                await asyncio.sleep(0.05)

    try:
        await process.ready(f"http://127.0.0.1:{metrics}")
        assert [await status(key) for key in ("one", "fixed", "two")] == [200, 200, 401]
        worker.reply, worker.token_s = [(50 + n, f" word{n}") for n in range(200)], 0.02
        body = {"prompt": "x", "max_tokens": 200}
        running = asyncio.create_task(http.post(f"{base}/generate", json=body, headers={"x-api-key": "kvf_one"}))
        await until(lambda: worker.generated > 5)
        mount(secret, "v2", entries("two"))
        await becomes("two", 200)
        assert [await status(key) for key in ("one", "fixed")] == [401, 200]
        mount(secret, "v3", "[[keys")
        process.hang_up()
        await until(lambda: "cannot be used" in process.log)
        assert await status("two") == 200
        audit.rename(tmp_path / "audit.1")
        mount(secret, "v4", entries("three"))
        process.hang_up()  # at once
        await becomes("three", 200)
        worker.token_s = 0.0
        assert "word199" in (await running).text
        text = (await http.get(f"http://127.0.0.1:{metrics}/metrics")).text
        assert "kvfleet_ingress_api_key_reloads_total 2.0" in text
        assert "kvfleet_ingress_api_key_reload_failures_total 1.0" in text
        assert "kvfleet_ingress_api_keys 2.0" in text
        assert (await http.get(f"http://127.0.0.1:{metrics}/livez")).status_code == 200
        assert (await http.get(f"{base}/metrics")).status_code == 401
        assert await process.stop() == 0
        written = (tmp_path / "audit.1").read_text() + audit.read_text()
        lines = [json.loads(line) for line in written.splitlines()]
        assert [line["ok"] for line in lines if line["event"] == "reload"] == [True, False, True]
        assert "request.end" in [line["event"] for line in lines]
        refused = [line for line in process.log.splitlines() if "cannot be used" in line]
        assert len(refused) == 1
    finally:
        await process.stop()


async def test_tls_and_a_certificate_that_is_renewed(
    nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker, tmp_path: Path
) -> None:
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    write_certificate(cert, key, serial=1)
    port = free_port()
    process = IngressProcess(nats_url, fleet_buckets, tmp_path, port=port, tls_cert=cert, tls_key=key)
    base = f"https://localhost:{port}"
    try:
        await process.ready(base, cert)
        assert await serial_of(port, cert) == 1
        context = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(verify=context, trust_env=False) as http:
            answer = await http.post(f"{base}/generate", json={"prompt": "x"})
            assert (answer.status_code, '"type":"done"' in answer.text) == (200, True)
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://localhost:{port}/livez")
            whole = cert.read_bytes()
            cert.write_text("no certificate")
            process.hang_up()
            await until(lambda: "cannot be used" in process.log)
            cert.write_bytes(whole)
            assert await serial_of(port, cert) == 1
            write_certificate(cert, key, serial=2)
            process.hang_up()
            async with asyncio.timeout(LIMIT_S):
                while await serial_of(port, cert) != 2:
                    await asyncio.sleep(0.05)
            assert (await http.get(f"{base}/livez")).status_code == 200, "connections go on"
        assert await process.stop() == 0
    finally:
        await process.stop()


async def serial_of(port: int, cert: Path) -> int:
    """Of the certificate that is shown to a new connection; 0 where it is not the one in the file."""
    from cryptography import x509

    context = ssl.create_default_context(cafile=str(cert))
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    except ssl.SSLError:
        return 0
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return int(x509.load_der_x509_certificate(shown).serial_number)


PRESENTED = "kvf_S3cretOfACaller0123456789abcdefghij"
WRONG = "kvf_Wr0ngSecret0123456789abcdefghijklmn"


async def test_no_key_is_in_anything_that_is_written(
    nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    """Neither in logs at debug level, in the audit log, in answers to those who may not see them, nor in metrics."""
    issuer = LocalIssuer()
    keys, audit = tmp_path / "keys.json", tmp_path / "audit.jsonl"
    text = json.dumps([{"name": "it", "sha256": hash_key(PRESENTED), "admin": True}])
    keys.write_text(text)
    port = free_port()
    process = IngressProcess(
        nats_url, fleet_buckets, tmp_path, port=port, api_keys_file=keys, audit_log=audit, log_level="debug",
        oidc_issuer=issuer.url, oidc_audience="kvfleet",
    )  # fmt: skip
    base = f"http://127.0.0.1:{port}"
    good, bad = token(issuer.url), token(issuer.url, aud="other")
    secrets = [PRESENTED, WRONG, good, bad, good.rsplit(".", 1)[1], bad.rsplit(".", 1)[1], hash_key(PRESENTED)]
    answers: list[str] = []
    try:
        await process.ready(base)
        await until(lambda: issuer.asked)
        for said in (PRESENTED, WRONG, good, bad):
            known = said in (PRESENTED, good)
            for headers in (
                {"authorization": f"Bearer {said}"},
                {"x-api-key": said},
                {"authorization": f"Basic {said}"},
            ):
                for method, path, body in (
                    ("POST", "/generate", {"prompt": said, "stop": [said]}),
                    ("POST", "/generate", {"prompt": "x", "seq_id": said, "max_tokens": 0}),
                    ("POST", "/generate", {"prompt": "x", "model_name": said}),
                    ("POST", "/v1/completions", {"model": said, "prompt": "x", "user": said}),
                    ("POST", "/v1/completions", {"model": "demo", "prompt": "x", "policy": said, "api_key": said}),
                    ("POST", "/v1/completions", {"model": "demo", "prompt": "x", "priority": said}),
                    ("POST", "/v1/chat/completions", {"model": "demo", "messages": [{"role": said, "content": said}]}),
                    ("GET", f"/v1/models?key={said}&api_key={said}", None),
                    ("GET", f"/sessions/none?access_token={said}", None),
                    ("GET", f"/nowhere?key={said}", None),
                    ("GET", "/stats", None),
                ):
                    answer = await http.request(method, base + path, json=body, headers=headers)
                    assert answer.status_code != 500
                    if body is None or not known:
                        answers.append(answer.text + str(answer.headers))
        worker.failure = ("engine_failure", "broken", False)
        await http.post(f"{base}/generate", json={"prompt": PRESENTED}, headers={"x-api-key": PRESENTED})
        malformed = {"x-api-key": PRESENTED, "last-event-id": PRESENTED}
        await http.post(f"{base}/generate", content=PRESENTED.encode(), headers=malformed)
        metrics = (await http.get(f"{base}/metrics", headers={"x-api-key": PRESENTED})).text
        assert "kvfleet_ingress_refused_callers_total" in metrics
        keys.write_text(text.replace(hash_key(PRESENTED), PRESENTED))  # the key itself, by mistake
        process.hang_up()
        await until(lambda: "cannot be used" in process.log)
        assert await process.stop() == 0
    finally:
        issuer.stop()
        await process.stop()
    written = {"log": process.log, "audit": audit.read_text(), "metrics": metrics, "answers": "".join(answers)}
    assert len(written["audit"].splitlines()) > 20
    assert "debug" in written["log"].lower() or len(written["log"]) > 500
    found = [(secret[:12], where) for secret in secrets for where, said in written.items() if secret in said]
    assert not found


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"api_keys_file": "none.toml"}, "api_keys_file"),
        ({"api_keys": "[[keys]]"}, "api_keys[0].sha256"),
        ({"oidc_issuer": "http://issuer.example", "oidc_audience": "x"}, "oidc_issuer"),
        ({"oidc_issuer": "https://issuer.example"}, "oidc_audience"),
        ({"oidc_audience": "x"}, "oidc_issuer"),
        ({"oidc_issuer": "https://i.example", "oidc_audience": "x", "oidc_algorithms": "HS256"}, "oidc_algorithms"),
        ({"oidc_issuer": "https://i.example", "oidc_audience": "x", "oidc_jwks": "none.json"}, "oidc_jwks"),
        ({"audit_log": "/nowhere/audit"}, "audit_log"),
        ({"tls_cert": "cert.pem"}, "tls_key"),
        ({"tls_cert": "cert.pem", "tls_key": "key.pem"}, "tls_cert"),
    ],
)
async def test_an_ingress_does_not_start_half_guarded(settings: dict[str, str], named: str) -> None:
    from kvfleet.ingress.auth.access import Access
    from kvfleet.ingress.settings import IngressSettings
    from kvproto.errors import InvalidRequest

    with pytest.raises(InvalidRequest) as error:
        Access(IngressSettings(**settings), lambda: 0.0)  # type: ignore[arg-type]
    assert error.value.field == named
