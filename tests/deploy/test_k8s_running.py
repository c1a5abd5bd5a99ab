"""The overlay `local` as processes: three nats-servers that find each other by TLS and are healthy by what the probes
ask, the init job, and a fleet of one pod of each role, with the keys, certificates and settings that the manifests give
them. A request comes in by HTTPS; then a worker and a server leave as their hooks say.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvproto.testing.nats_process import find_nats_server
from tests.deploy.k8s_objects import Object, named, pods
from tests.deploy.k8s_render import K8S, ROOT, copied, render, render_or_fail
from tests.deploy.k8s_running import Running, nats_servers, of_image, replaced
from tests.support.secrets_rig import Secrets
from tests.support.waiting import LIMIT_S, wait_until

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets.make(tmp_path_factory.mktemp("secrets") / "made")


@contextlib.contextmanager
def running(some: list[Running]) -> Iterator[list[Running]]:
    for one in some:
        one.start()
    try:
        yield some
    finally:
        for one in some:
            with contextlib.suppress(ProcessLookupError):
                one.process.kill()
            one.process.wait()


@pytest.fixture(scope="module")
def cluster(secrets: Secrets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Running]]:
    with running(nats_servers(render("local"), secrets, tmp_path_factory.mktemp("nats"))) as found:
        yield found


def container(kind: str, name: str) -> Object:
    (found,) = named(render("local"), kind, name)["spec"]["template"]["spec"]["containers"]
    return found


def logs(*some: Running) -> str:
    return "\n".join(one.log for one in some)


def answers(one: Running, kind: str, name: str) -> bool:
    """Whether all probes of the container pass."""
    asked = [container(kind, name)[probe]["httpGet"] for probe in PROBES]
    return all(one.get(probe["path"], probe["port"])[0] == 200 for probe in asked)


def init(cluster: list[Running], secrets: Secrets, folder: Path) -> tuple[int, str]:
    (pod,) = [one for one in pods(render("local")) if one.component == "init"]
    job = of_image(pod, render("local"), secrets, folder, cluster)
    done = subprocess.run(
        job.command, env=job.env, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


def test_three_servers_become_one_cluster(cluster: list[Running], secrets: Secrets, tmp_path: Path) -> None:
    wait_until(lambda: all(answers(one, "StatefulSet", "nats") for one in cluster), told=lambda: logs(*cluster))
    for one in cluster:
        told = one.get("/varz", "monitor")[1]
        assert (told["server_name"], told["cluster"]["name"]) == (one.name, "kvfleet")
        assert told["jetstream"]["config"]["store_dir"].startswith(one.paths["/data"])
        assert (told["tls_required"], told["tls_verify"]) == (True, True)
    assert init(cluster, secrets, tmp_path / "once") == (0, "buckets of namespace kvf are ready\n")
    replicas = {
        stream["name"]: stream["config"]["num_replicas"]
        for one in cluster
        for account in one.get("/jsz?accounts=true&streams=true&config=true", "monitor")[1]["account_details"]
        for stream in account.get("stream_detail", [])
    }
    assert set(replicas.values()) == {3}
    assert {"KV_kvf_members", "KV_kvf_keys", "KV_kvf_sessions", "KV_kvf_responses"} <= set(replicas)


@pytest.mark.parametrize("document", ["deploy/k8s/README.md", "docs/gke.md"])
def test_an_operator_comes_in_as_documented(document: str, cluster: list[Running], secrets: Secrets) -> None:
    """By a forwarded port: under the name that the documented `kvfleet secrets` puts into the certificate."""
    wait_until(lambda: all(answers(one, "StatefulSet", "nats") for one in cluster), told=lambda: logs(*cluster))
    text = (ROOT / document).read_text()
    told = dict(re.findall(r"(KVFLEET_NATS_\w+)=(\S+)", "\n".join(re.findall(r"^export .*$", text, re.MULTILINE))))
    assert told.keys() == {f"KVFLEET_NATS_{name}" for name in ("URL", "CA", "CERT", "KEY", "NKEY_SEED_FILE")}
    assert f"pod/nats-0 {told['KVFLEET_NATS_URL'].rpartition(':')[2]}:4222" in text
    (made,) = re.findall(r"kvfleet secrets --out (\S+)(?= --host localhost )", text)
    forwarded = {f"{made}/": f"{secrets.folder}/", "localhost:4222": f"localhost:{cluster[0].ports['client']}"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVFLEET_")}
    env |= {key: replaced(value, forwarded) for key, value in told.items()} | {"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvfleet.cli.main", "init", "--replicas", "3"],
        env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "buckets of namespace kvf are ready\n")


def test_a_fleet_serves_with_what_the_manifests_give_it(
    cluster: list[Running], secrets: Secrets, tmp_path: Path
) -> None:
    roles = {pod.component: pod for pod in pods(render("local"))}
    fleet = {
        role: of_image(roles[role], render("local"), secrets, tmp_path, cluster)
        for role in ("placement", "vault", "worker", "ingress")
    }
    fleet["worker"].env["KVFLEET_RUNNER"] = "fake"  # without torch: it starts in a second
    kinds = {role: roles[role].owner["kind"] for role in fleet}
    with running(list(fleet.values())) as processes:
        wait_until(
            lambda: all(answers(one, kinds[role], role) for role, one in fleet.items()),
            150,
            told=lambda: logs(*processes),
        )
        assert all(one.get("/metrics", "metrics")[0] == 200 for one in processes)
        for role, used in (("ingress", {"nats", "https"}), ("placement", {"nats"}), ("worker", {"nats", "data_plane"})):
            shown = httpx.get(f"http://127.0.0.1:{fleet[role].ports['metrics']}/metrics", trust_env=False).text
            assert set(re.findall(r'kvfleet_certificate_expiry_seconds\{certificate="(\w+)"\} 1\.', shown)) == used
        ingress, worker = fleet["ingress"], fleet["worker"]
        trusting = ssl.create_default_context(cafile=secrets["ca.crt"])
        bearer = {"Authorization": f"Bearer {secrets.text('api-key.txt')}"}
        url = f"https://127.0.0.1:{ingress.ports['https']}"
        with httpx.Client(base_url=url, verify=trusting, trust_env=False, timeout=LIMIT_S) as http:
            body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
            assert http.post("/generate", json=body).status_code == 401
            answer = http.post("/generate", json=body, headers=bearer)
            assert answer.status_code == 200, logs(*processes)
            assert answer.text.count('"type":"token"') == 4
            there = http.get("/workers", headers=bearer).json()
        assert list(there) == ["worker-0"], "called as its pod is"

        hook = container("StatefulSet", "worker")["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[0] == "kvfleet"
        here = [str(worker.process.pid) if part == "1" else part for part in hook[1:]]  # in a container it is the first
        subprocess.run([sys.executable, "-P", "-m", "kvfleet.cli.main", *here], env=worker.env, check=True, cwd=ROOT)
        assert worker.process.wait(LIMIT_S) == 0, worker.log
        wait_until(lambda: ingress.get("/readyz", "metrics")[0] == 503, told=lambda: logs(*processes))
        assert ingress.get("/livez", "metrics")[0] == 200, "it waits for another worker"


def test_a_server_reads_its_certificates_again(cluster: list[Running]) -> None:
    """As the README says: Secrets change in place, and the server is told."""
    (told,) = re.findall(r"nats-server (-sl=reload=\S+?)`", (K8S / "README.md").read_text())
    one = cluster[0]
    subprocess.run([find_nats_server(), replaced(told, one.paths)], check=True, timeout=LIMIT_S)
    wait_until(lambda: "Reloaded: tls" in (one.folder / "log").read_text(), told=lambda: one.log)
    assert "Failed to reload" not in (one.folder / "log").read_text()


def test_a_server_leaves_as_its_hook_says(cluster: list[Running]) -> None:
    leaving = cluster[0]
    hook = container("StatefulSet", "nats")["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[0] == container("StatefulSet", "nats")["command"][0]
    subprocess.run(
        [find_nats_server(), *(replaced(part, leaving.paths) for part in hook[1:])], check=True, timeout=LIMIT_S
    )
    leaving.process.send_signal(signal.SIGTERM)
    given = named(render("local"), "StatefulSet", "nats")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    leaving.process.wait(given)
    assert "Entering lame duck mode" in (leaving.folder / "log").read_text()
    text = (K8S / "base" / "nats" / "kubernetes.conf").read_text()
    seconds = {key: int(value) for key, value in re.findall(r'(lame_duck\w+): "(\d+)s"', text)}
    assert set(seconds) == {"lame_duck_grace_period", "lame_duck_duration"}
    assert sum(seconds.values()) + 10 < given


def test_every_file_of_the_configuration_is_there(secrets: Secrets, tmp_path: Path) -> None:
    """`nats-server -t` follows each include; without one of them it says which."""
    (first, *_) = nats_servers(render("gke-gpu"), secrets, tmp_path)
    check = [*first.command, "-t"]
    good = subprocess.run(check, env=first.env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert good.returncode == 0, good.stderr
    shutil.rmtree(first.folder / "configuration" / "roles")
    bad = subprocess.run(check, env=first.env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert bad.returncode != 0
    assert "roles/" in bad.stderr


def test_a_tenants_producer_is_added_as_documented(tmp_path: Path) -> None:
    """The edits of both READMEs, one after the other; without the last one the server says what it lacks."""
    secrets = Secrets.make(tmp_path / "secrets", "acme")
    k8s = copied(tmp_path)
    nats = k8s.parent / "nats"
    told, more = (K8S / "README.md").read_text(), (nats / "README.md").read_text()

    def edit(path: Path, after: str, line: str) -> None:
        text = path.read_text()
        assert after in text
        path.write_text(text.replace(after, f"{after}\n{line}"))

    (include,) = re.findall(r"`(include ./roles/producer-acme.conf)`", more)
    (user,) = re.findall(r"{ nkey: \$KVF_PRODUCER_acme_NKEY.*", more)
    (file,) = re.findall(r"`(- roles-producer-acme.conf=\S+)`", told)
    (item,) = re.findall(r"`(- { key: roles-producer-acme.conf.*?})`", told)
    role = (nats / "roles" / "producer.conf.template").read_text().replace("TENANT", "acme")
    (nats / "roles" / "producer-acme.conf").write_text(role)
    edit(nats / "roles.conf", "include ./roles/producer-public.conf", include)
    edit(nats / "accounts-nkeys.conf", "permissions: $producer_public_may }", user)
    edit(nats / "kustomization.yaml", "- roles-producer-public.conf=roles/producer-public.conf", f"      {file}")
    for complete in (False, True):
        if complete:
            after = "- { key: roles-producer-public.conf, path: roles/producer-public.conf }"
            edit(k8s / "base" / "nats" / "nats.yaml", after, f"{20 * ' '}{item}")
        here = tmp_path / str(complete)
        (first, *_) = nats_servers(render_or_fail(k8s / "overlays" / "local"), secrets, here)
        check = subprocess.run([*first.command, "-t"], env=first.env, capture_output=True, timeout=LIMIT_S, check=False)
        assert (check.returncode == 0) == complete, check.stderr
