"""scripts/quickstart_gke with the real `kvfleet secrets`, openssl, curl and `kubectl create`: what reaches a cluster.

kubectl asks no server for this. Applying is recorded, not done.
"""

from __future__ import annotations

import base64
import importlib.util
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from tests.deploy.gke_stage import ROLES, ROOT, Ran, Stage, authority, make_stage
from tests.support.waiting import LIMIT_S

KUBECTL = shutil.which("kubectl")
CONTEXT = "gke_my-project_us-central1_kvfleet"
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
    "contexts": [{"name": CONTEXT, "context": {"cluster": "c", "user": "u"}}],
    "users": [{"name": "u", "user": {"token": "none"}}],
}
TLS = {"tls.crt", "tls.key", "ca.crt"}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, Ran]:
    """One run, and where it ran."""
    if KUBECTL is None:
        pytest.skip("kubectl is not installed")
    if importlib.util.find_spec("kvfleet.cli.secrets.secrets_command") is None:
        pytest.skip("`kvfleet secrets` is not there")
    stage = make_stage(tmp_path_factory.mktemp("quickstart"))
    (stage.base / "kubeconfig").write_text(yaml.safe_dump(KUBECONFIG))
    kvfleet = stage.base / "bin/kvfleet"
    kvfleet.unlink()
    main = "import sys; from kvfleet.cli.main import main; sys.exit(main())"
    kvfleet.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT}/libs:{ROOT} exec {sys.executable} -c '{main}' \"$@\"\n")
    kvfleet.chmod(0o755)
    ran = stage.quickstart("--yes", REAL_KUBECTL=str(KUBECTL))
    assert ran.code == 0, ran.err
    return stage, ran


def test_the_secrets_on_the_cluster_are_those_of_the_folder(quickstart: tuple[Stage, Ran]) -> None:
    stage, ran = quickstart
    folder = stage.base / "work/secrets"
    objects = [found for found in yaml.safe_load_all(ran.applied) if found]
    assert [o["kind"] for o in objects] == ["Namespace", *["Secret"] * 7]
    secrets = {o["metadata"]["name"]: o for o in objects[1:]}
    assert all(o["metadata"]["namespace"] == "kvfleet" for o in secrets.values())
    keys = {name: set(o["data"]) for name, o in secrets.items()}
    users = keys.pop("kvfleet-nats-nkeys")
    assert {f"KVF_{role.upper()}_NKEY" for role in ROLES} <= users
    assert keys == {
        "kvfleet-nats-tls": TLS,
        "kvfleet-node-tls": TLS,
        "kvfleet-nkeys": {f"{role}.seed" for role in ROLES},
        "kvfleet-fleet-key": {"fleet.key"},
        "kvfleet-api-keys": {"api-keys.toml"},
        "kvfleet-ingress-tls": {"tls.crt", "tls.key"},
    }
    for secret, key, file in (
        ("kvfleet-nats-tls", "tls.key", "nats.key"),
        ("kvfleet-node-tls", "tls.crt", "node.crt"),
        ("kvfleet-node-tls", "ca.crt", "ca.crt"),
        ("kvfleet-nkeys", "worker.seed", "nkeys/worker.seed"),
        ("kvfleet-ingress-tls", "tls.crt", "ingress.crt"),
    ):
        assert base64.b64decode(secrets[secret]["data"][key]) == (folder / file).read_bytes(), (secret, key)
    pin = dict(line.split("=", 1) for line in (folder / "nats.env").read_text().splitlines())["KVF_ADMIN_NKEY"]
    assert base64.b64decode(secrets["kvfleet-nats-nkeys"]["data"]["KVF_ADMIN_NKEY"]).decode() == pin


def test_the_fleets_authority_signs_the_ingress_certificate_and_names_nats(quickstart: tuple[Stage, Ran]) -> None:
    folder = quickstart[0].base / "work/secrets"

    def openssl(*arguments: str) -> str:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=LIMIT_S)
        return done.stdout + done.stderr

    assert openssl("verify", "-x509_strict", "-CAfile", f"{folder}/ca.crt", f"{folder}/ingress.crt").endswith("OK\n")
    for name in ("nats", "nats-0.nats", "nats-2.nats", "nats-1.nats.kvfleet.svc.cluster.local"):
        said = openssl("x509", "-in", f"{folder}/nats.crt", "-noout", "-checkhost", name)
        assert "does match" in said, name


class Ingress(BaseHTTPRequestHandler):
    """Answers as a fleet does, over TLS, to whoever has the key."""

    key = ""
    asked: list[str]  # of each server's own class

    def do_GET(self) -> None:
        self.answer(b'{"data": []}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'data: {"type":"token"}\n\ndata: {"type":"done"}\n\n')

    def answer(self, body: bytes) -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {self.key}" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_last_request_is_verified_by_the_fleets_authority(quickstart: tuple[Stage, Ran]) -> None:
    stage = quickstart[0]
    folder = stage.base / "work/secrets"
    handler = type("Handler", (Ingress,), {"key": (folder / "api-key.txt").read_text().strip(), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "ingress.crt", folder / "ingress.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    curl = stage.base / "bin/curl"  # the real one, which finds 203.0.113.10:443 on this machine and is not patient
    curl.unlink()
    curl.write_text(
        f'#!/bin/bash\nset -- "${{@/:443:203.0.113.10:443/:443:127.0.0.1:{server.server_port}}}"\n'
        f'exec {shutil.which("curl")} "${{@/#--retry-all-errors/--no-progress-meter}}"\n'
    )
    curl.chmod(0o755)
    try:
        ran = stage.deploy("--secrets", str(folder))
        assert ran.code == 0, ran.err
        assert handler.asked == ["GET /v1/models", "POST /generate"]
        (folder / "ingress-ca.crt").write_text(authority()[0])  # another one
        refused = stage.deploy("--secrets", str(folder))
        assert refused.code == 1
        assert "does not answer" in refused.err
        assert len(handler.asked) == 2
    finally:
        server.shutdown()
        server.server_close()
