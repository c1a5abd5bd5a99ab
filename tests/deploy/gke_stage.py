"""A place to run scripts/deploy_gke and scripts/quickstart_gke in: recorders stand for every tool that would reach a
cluster (fake_tool.sh), before the real ones on PATH, and the scripts are a copy beside a small overlay.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_tool.sh")
TOOLS = ("gcloud", "kubectl", "terraform", "docker", "curl", "kvfleet", "gke-gcloud-auth-plugin")
ROLES = ("admin", "ingress", "placement", "worker", "vault", "sys")
SECRET_FILES = (
    *(
        "ca.key",
        "nats.key",
        "node.key",
        "fleet.key",
        "api-keys.toml",
        "api-key.txt",
        "nats.crt",
        "node.crt",
        "nats.env",
    ),
    *(f"nkeys/{user}.seed" for user in (*ROLES, "producer-public")),
)
OVERLAY = """images:
  - { name: kvfleet-control, newName: REGION/PROJECT/kvfleet-control, newTag: 0.1.0 }
"""
SETTINGS = "data:\n  project: PROJECT\n  ingress_address: 192.0.2.1 # a comment\n  accelerator: nvidia-l4\n"
FLEET = "\n---\n".join(
    f"apiVersion: apps/v1\nkind: {kind}\nmetadata:\n  labels:\n    a: b\n  name: {name}\n"
    "spec:\n  image: eu/x/kvfleet-nats:t1"
    for kind, name in (
        *(("Job", "init"), ("StatefulSet", "nats"), ("StatefulSet", "worker"), ("StatefulSet", "vault")),
        *(("Deployment", "placement"), ("Deployment", "ingress")),
    )
)


@dataclass
class Ran:
    code: int
    out: str
    err: str
    calls: list[list[str]]
    stdin: str  # what curl was given
    applied: str  # what `kubectl apply -f -` was given

    @property
    def lines(self) -> list[str]:
        return [" ".join(call) for call in self.calls]

    def where(self, *words: str) -> int:
        """The first call that has all these words."""
        return next(i for i, call in enumerate(self.calls) if all(word in call for word in words))

    def has(self, *words: str) -> bool:
        return any(all(word in call for word in words) for call in self.calls)


@dataclass
class Stage:
    """A copy of the scripts with a small overlay, and a PATH with recorders at its front."""

    base: Path
    typed: str = ""

    @property
    def root(self) -> Path:
        return self.base / "root"

    @property
    def secrets(self) -> Path:
        return self.base / "my fleet's secrets"

    def run(self, script: str, *arguments: str, **environment: str) -> Ran:
        record = self.base / "record"
        for path in self.base.glob("record*"):
            path.unlink()
        variables = {
            "PATH": f"{self.base / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.base / "home"),
            "TMPDIR": str(self.base / "tmp"),
            "RECORD": str(record),
            "FAKES": str(self.base),
            **environment,
        }
        done = subprocess.run(
            ["bash", str(self.root / "scripts" / script), *arguments],
            env=variables, input=self.typed, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip

        def read(path: Path) -> str:
            return path.read_text() if path.exists() else ""

        calls = [call.split("\x1f")[:-1] for call in read(record).split("\x1e")[:-1]]
        stdin, applied = (read(record.with_name(f"record.{name}")) for name in ("stdin", "applied"))
        return Ran(done.returncode, done.stdout, done.stderr, calls, stdin, applied)

    def deploy(self, *more: str, **environment: str) -> Ran:
        wanted = ["--context", "ctx", "--images", "eu/x", "--tag", "t1", "--secrets", str(self.secrets)]
        wanted += ["--set", "project=my-project", "--set", "ingress_address=203.0.113.10"]
        return self.run("deploy_gke", *wanted, *more, **environment)

    def quickstart(self, *more: str, **environment: str) -> Ran:
        wanted = [
            "--project",
            "my-project",
            "--authorized-network",
            "203.0.113.7/32",
            "--work",
            str(self.base / "work"),
        ]
        return self.run("quickstart_gke", *wanted, "--tag", "t1", *more, **environment)


@functools.cache
def authority() -> tuple[str, str]:
    """A certificate authority: its certificate and key. Certificates signed by it are really made."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Path(folder, "ca.crt"), Path(folder, "ca.key")
        make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
        make += ["-subj", "/CN=ca", "-out", str(pair[0]), "-keyout", str(pair[1])]
        subprocess.run(make, check=True, capture_output=True, timeout=LIMIT_S)
        return pair[0].read_text(), pair[1].read_text()


def make_folder(folder: Path) -> None:
    """What `kvfleet secrets` makes: every file says which it is."""
    for name in SECRET_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"CONTENT-OF-{name}\n")
    for name, text in zip(("ca.crt", "ca.key"), authority(), strict=True):
        (folder / name).write_text(text)


def make_stage(base: Path) -> Stage:
    stage = Stage(base)
    overlay = stage.root / "deploy/k8s/overlays/gke-gpu"
    for folder in (base / "bin", base / "tmp", base / "home", stage.root / "scripts", overlay):
        folder.mkdir(parents=True)
    for script in ("deploy_gke", "quickstart_gke", "gke_steps.sh"):
        shutil.copy(ROOT / "scripts" / script, stage.root / "scripts")
    for tool in TOOLS:
        (base / "bin" / tool).symlink_to(FAKE)
    (stage.root / "scripts/build_images").symlink_to(FAKE)
    (overlay / "kustomization.yaml").write_text(OVERLAY)
    (overlay / "settings.yaml").write_text(SETTINGS)
    (base / "fleet.yaml").write_text(FLEET + "\n")
    make_folder(base / "secrets")
    make_folder(stage.secrets)
    for name in ("ingress.crt", "ingress.key"):
        (stage.secrets / name).write_text(f"CONTENT-OF-{name}\n")
    return stage


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def printed(text: str) -> list[list[str]]:
    """The commands of a dry run, as argument lists; of `a | b` both."""
    text = re.sub(r"(?ms)^cat >.*?^END$", "", text)
    found: list[list[str]] = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            words: list[str] = []
            for word in [*shlex.split(line), "|"]:
                if word == "|":
                    found.append(words)
                    words = []
                elif not word.startswith(">"):
                    words.append(word)
    return found
