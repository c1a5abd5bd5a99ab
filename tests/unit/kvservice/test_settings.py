"""Settings come from flags and the environment, once; a wrong one is one line that names it."""

from __future__ import annotations

import re
from pathlib import Path

import nkeys
import pytest

from kvfleet.ingress.settings import IngressSettings
from kvfleet.placement.settings import PlacementSettings
from kvfleet.vault.settings import VaultSettings
from kvfleet.worker.settings import WorkerSettings
from kvproto.errors import InvalidRequest, Unavailable
from kvservice.data_plane import DataPlaneSettings, client_context, server_context
from kvservice.membership import tls_context
from kvservice.settings import ServiceSettings, load


class Sample(ServiceSettings):
    slots: int = 4


def test_defaults_environment_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(Sample, [], "sample").slots == 4
    monkeypatch.setenv("KVFLEET_SLOTS", "7")
    monkeypatch.setenv("KVFLEET_NATS_URL", "nats://a:1, nats://b:2")
    settings = load(Sample, [], "sample")
    assert settings.slots == 7
    assert settings.nats_servers == ["nats://a:1", "nats://b:2"]
    assert load(Sample, ["--slots", "9"], "sample").slots == 9, "a flag wins"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(Sample, [], "sample").slots = 5


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--slots", "many"], "--slots"), (["--metrics-port", "70000"], "--metrics-port"), (["--absent", "1"], "absent")],
)
def test_a_wrong_value_names_the_flag(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Sample, flags, "sample")
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


# ---------------------------------------------------------------------- secrets in files

SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
ACCOUNT = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_ACCOUNT).decode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "secret"


@pytest.mark.parametrize("kind", [WorkerSettings, PlacementSettings, IngressSettings])
def test_the_fleet_key_is_read_from_its_file(kind: type[ServiceSettings], file: Path) -> None:
    file.write_text("the key\n")
    settings = load(kind, ["--fleet-key-file", str(file)], "sample")
    assert settings.fleet_key == "the key"  # type: ignore[attr-defined]


def test_nkey_seeds_are_read_from_their_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f"{SEED}\n")
    monkeypatch.setenv("KVFLEET_NATS_NKEY_SEED_FILE", str(file))
    for kind in (WorkerSettings, IngressSettings, VaultSettings):
        assert load(kind, [], "sample").nats_nkey_seed == SEED
    placement = load(PlacementSettings, ["--system-nkey-seed-file", str(file)], "sample")
    assert (placement.nats_nkey_seed, placement.system_nkey_seed) == (SEED, SEED)


def test_secrets_are_not_shown_with_the_settings(file: Path) -> None:
    file.write_text(SEED)
    flags = ["--nats-nkey-seed-file", str(file), "--fleet-key", "hidden1", "--nats-password", "hidden2"]
    shown = repr(load(PlacementSettings, [*flags, "--system-password", "hidden3"], "sample"))
    assert "hidden" not in shown
    assert SEED not in shown


@pytest.mark.parametrize(
    ("kind", "flags", "content", "said"),
    [
        (WorkerSettings, ["--fleet-key-file", "FILE"], None, "--fleet-key-file: cannot read FILE: No such file"),
        (IngressSettings, ["--fleet-key-file", "FILE"], " \n", "--fleet-key-file: FILE is empty"),
        (WorkerSettings, ["--fleet-key-file", "FILE", "--fleet-key", "k"], "k", "--fleet-key-file: --fleet-key is gi"),
        (VaultSettings, ["--nats-nkey-seed-file", "FILE"], "SUNO", "--nats-nkey-seed-file: no nkey seed of a user"),
        (VaultSettings, ["--nats-nkey-seed-file", "FILE"], ACCOUNT, "--nats-nkey-seed-file: no nkey seed of a user"),
        (VaultSettings, ["--nats-nkey-seed", "SUNO"], None, "--nats-nkey-seed: no nkey seed of a user (SU...)"),
        (PlacementSettings, ["--system-nkey-seed-file", "FILE"], "\xff", "--system-nkey-seed-file: FILE holds somethi"),
    ],
)
def test_a_secret_that_cannot_be_read_is_one_clear_line(
    kind: type[ServiceSettings],
    flags: list[str],
    content: str | None,
    said: str,
    file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        file.write_text(content, "latin-1")
    with pytest.raises(SystemExit) as ended:
        load(kind, [flag.replace("FILE", str(file)) for flag in flags], "kvfleet sample")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvfleet sample: " + said.replace("FILE", str(file)))
    assert content is None or len(content.strip()) < 3 or content not in line


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    for name in ("absent", "text"):
        path = tmp_path / name
        with pytest.raises(Unavailable, match=re.escape(str(path))):
            tls_context(ServiceSettings(nats_ca=str(path)))
        with pytest.raises(Unavailable, match=re.escape(str(path))):
            server_context(DataPlaneSettings(data_plane_cert=path))
        with pytest.raises(Unavailable, match=re.escape(str(path))):
            client_context(DataPlaneSettings(data_plane_ca=path))


def test_half_of_the_tls_settings_are_no_tls() -> None:
    """Who forgets the CA must not be left without TLS in silence."""
    with pytest.raises(InvalidRequest, match="needs --nats-ca"):
        tls_context(ServiceSettings(nats_cert="node.crt", nats_key="node.key"))
    with pytest.raises(InvalidRequest, match="needs --data-plane-cert"):
        server_context(DataPlaneSettings(data_plane_ca=Path("ca.crt")))
