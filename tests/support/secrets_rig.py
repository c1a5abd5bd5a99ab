"""`kvfleet secrets` and deploy/nats/production.conf as tests use them: real files, in a test's folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvfleet.cli.secrets.secrets_folder import WantedSecrets, fill
from kvproto.testing.fixtures import NatsServer

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Secrets:
    """A folder of `kvfleet secrets`."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, *tenants: str, days: int = 2, ago: timedelta = timedelta(0)) -> Secrets:
        fill(folder, WantedSecrets(HOSTS, tenants, days), datetime.now(UTC) - ago)
        return cls(folder)

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text().strip()

    def seed(self, user: str) -> str:
        return self.text(f"nkeys/{user}.seed")

    @property
    def nats_env(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.text("nats.env").splitlines())

    def nats_tls(self, node: str = "node") -> dict[str, str]:
        """Settings of a process towards NATS."""
        return {"nats_ca": self["ca.crt"], "nats_cert": self[f"{node}.crt"], "nats_key": self[f"{node}.key"]}

    def data_plane_tls(self, node: str = "node") -> dict[str, Path]:
        return {
            "data_plane_ca": self.folder / "ca.crt",
            "data_plane_cert": self.folder / f"{node}.crt",
            "data_plane_key": self.folder / f"{node}.key",
        }


def production(folder: Path, secrets: Secrets, *tenants: str, server: str = "nats") -> Path:
    """A copy of deploy/nats whose certificates are beside it, with producers of `tenants`; the main file. Without its
    monitoring port, which is one for the whole machine."""
    shutil.copytree(DEPLOY, folder)
    tls = folder / "tls"
    tls.mkdir()
    for name, of in (("tls.crt", f"{server}.crt"), ("tls.key", f"{server}.key"), ("ca.crt", "ca.crt")):
        shutil.copy(secrets[of], tls / name)
    for tenant in tenants:
        add_tenant(folder, tenant, "accounts-nkeys.conf")
    for name in ("production.conf", "production-cluster.conf", "region-hub.conf", "region-leaf.conf"):
        path = folder / name
        text = path.read_text().replace("/etc/nats/tls", str(tls))
        path.write_text(text.replace('http: "127.0.0.1:8222"\n', ""))
    return folder / "production.conf"


def add_tenant(folder: Path, tenant: str, accounts: str) -> None:
    """As deploy/nats/README.md says."""
    template = (folder / "roles" / "producer.conf.template").read_text()
    (folder / "roles" / f"producer-{tenant}.conf").write_text(template.replace("TENANT", tenant))
    with (folder / "roles.conf").open("a") as roles:
        roles.write(f"include ./roles/producer-{tenant}.conf\n")
    users = (folder / accounts).read_text()
    (public,) = [line for line in users.splitlines(keepends=True) if "producer_public_may" in line]
    another = public.replace("producer-public", f"producer-{tenant}").replace("_public", f"_{tenant}")
    (folder / accounts).write_text(users.replace(public, public + another))


def tls_url(server: NatsServer) -> str:
    return server.url.replace("nats://", "tls://")
