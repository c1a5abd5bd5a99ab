"""`kvfleet secrets`: what it makes, what it keeps, and that strict verifiers take it."""

from __future__ import annotations

import asyncio
import re
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nkeys
import pytest
from cryptography import x509
from typer.testing import CliRunner

from kvfleet.cli.commands import app
from kvfleet.cli.secrets.secrets_certificates import hosts_of, is_signed_by, pin, read_certificate, read_key
from kvfleet.cli.secrets.secrets_folder import DEFAULT_HOSTS, ROLES, Report, WantedSecrets, fill
from kvfleet.ingress.auth.api_keys import parse_keys
from kvfleet.ingress.auth.tenancy import Tenancy
from kvproto.errors import InvalidRequest, Unavailable

DEPLOY = Path(__file__).parents[3] / "deploy" / "nats"
NOW = datetime.now(UTC)
USERS = [*ROLES, "producer-acme", "producer-public"]
LEAFS = ("nats", "node", "producer-acme", "producer-public")


def make(folder: Path, now: datetime = NOW, **wanted: object) -> Report:
    return fill(folder, WantedSecrets(**{"tenants": ("acme",), **wanted}), now)  # type: ignore[arg-type]


def certificate(folder: Path, name: str) -> x509.Certificate:
    return read_certificate((folder / f"{name}.crt").read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_there_and_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    report = make(folder)
    expected = {"ca.crt", "ca.key", "nats.env", "fleet.key", "api-keys.toml", "api-key.txt"}
    expected |= {f"{leaf}.{kind}" for leaf in LEAFS for kind in ("crt", "key")}
    expected |= {f"nkeys/{user}.{kind}" for user in USERS for kind in ("seed", "pub")}
    assert set(contents(folder)) == set(report.written) == expected
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in expected} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "nkeys")} == {0o700}


def test_made_again_nothing_changes_and_another_tenant_is_added(tmp_path: Path) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    again = fill(tmp_path, WantedSecrets(), NOW)
    assert (again.written, contents(tmp_path)) == ([], before)
    more = fill(tmp_path, WantedSecrets(tenants=("beta",)), NOW)
    assert sorted(more.written) == [
        "nats.env", "nkeys/producer-beta.pub", "nkeys/producer-beta.seed", "producer-beta.crt", "producer-beta.key",
    ]  # fmt: skip
    after = contents(tmp_path)
    assert {name: after[name] for name in before if name != "nats.env"} == {
        name: data for name, data in before.items() if name != "nats.env"
    }
    assert before["nats.env"].splitlines()[0] in after["nats.env"]


def test_a_folder_from_before_regions_gains_their_link_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path)
    link = ["nkeys/region-link.pub", "nkeys/region-link.seed"]
    for name in link:
        (tmp_path / name).unlink()
    environment = tmp_path / "nats.env"
    lines = environment.read_text().splitlines(keepends=True)
    environment.write_text("".join(line for line in lines if "REGION" not in line))
    before = contents(tmp_path)
    assert sorted(make(tmp_path).written) == ["nats.env", *link]
    after = contents(tmp_path)
    public = (tmp_path / link[0]).read_text().strip()
    assert f"KVF_REGION_LINK_NKEY={public}\n" in environment.read_text()
    assert {name: after[name] for name in before if name != "nats.env"} == {
        name: data for name, data in before.items() if name != "nats.env"
    }


def test_nkeys_and_the_servers_environment_agree(tmp_path: Path) -> None:
    make(tmp_path, tenants=("acme", "with-dash"))
    given = dict(line.split("=") for line in (tmp_path / "nats.env").read_text().splitlines())
    for user in [*USERS, "producer-with-dash"]:
        pair = nkeys.from_seed(bytearray((tmp_path / f"nkeys/{user}.seed").read_bytes().strip()))
        public = pair.public_key.decode()
        assert (tmp_path / f"nkeys/{user}.pub").read_text().strip() == public
        assert public in given.values()
    assert len(set(given.values())) == len(given), "nobody shares a key"
    assert all(name.isidentifier() for name in given), "names that a shell can set"
    used = re.findall(r"\$(KVF_\w+)", (DEPLOY / "accounts-nkeys.conf").read_text())
    used += ["KVF_CLUSTER_PIN"]
    assert set(used) == set(given) - {"KVF_PRODUCER_acme_NKEY", "KVF_PRODUCER_with_dash_NKEY"}
    assert given["KVF_CLUSTER_PIN"] == pin(certificate(tmp_path, "nats"))
    assert given["KVF_CLUSTER_PIN"][0].isalpha()
    text = (tmp_path / "nats.env").read_text()
    assert not [user for user in USERS if (tmp_path / f"nkeys/{user}.seed").read_text().strip() in text]


def test_strict_verifiers_take_the_certificates(tmp_path: Path) -> None:
    """A handshake in memory, both sides with VERIFY_X509_STRICT."""
    make(tmp_path, hosts=("nats.example", "10.0.0.7", "*.nats.svc", "::1"))

    def context(kind: int, leaf: str) -> ssl.SSLContext:
        made = ssl.SSLContext(kind)
        made.load_cert_chain(tmp_path / f"{leaf}.crt", tmp_path / f"{leaf}.key")
        made.load_verify_locations(tmp_path / "ca.crt")
        made.verify_mode = ssl.CERT_REQUIRED
        made.verify_flags |= ssl.VERIFY_X509_STRICT
        return made

    for host, leaf in (
        ("nats.example", "node"), ("10.0.0.7", "producer-acme"), ("n-0.nats.svc", "nats"), ("::1", "node"),
    ):  # fmt: skip
        shake_hands(context(ssl.PROTOCOL_TLS_CLIENT, leaf), context(ssl.PROTOCOL_TLS_SERVER, "nats"), host)
    for host, server in (("other.example", "nats"), ("nats.example", "node"), ("localhost", "node")):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(context(ssl.PROTOCOL_TLS_CLIENT, "node"), context(ssl.PROTOCOL_TLS_SERVER, server), host)
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):  # a producer's serves nobody
        shake_hands(
            context(ssl.PROTOCOL_TLS_CLIENT, "node"),
            context(ssl.PROTOCOL_TLS_SERVER, "producer-acme"),
            "producer-acme",
        )


def shake_hands(client_side: ssl.SSLContext, server_side: ssl.SSLContext, host: str) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(10):
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert len(done) == 2


def test_lifetimes_and_hosts(tmp_path: Path) -> None:
    make(tmp_path)
    authority = certificate(tmp_path, "ca")
    assert timedelta(days=3649) < authority.not_valid_after_utc - NOW <= timedelta(days=3650)
    assert hosts_of(certificate(tmp_path, "nats")) == ("localhost", "nats", "127.0.0.1")
    assert set(hosts_of(certificate(tmp_path, "nats"))) == set(DEFAULT_HOSTS)
    for leaf in LEAFS:
        one = certificate(tmp_path, leaf)
        assert is_signed_by(one, authority)
        assert pin(one) == pin(read_key((tmp_path / f"{leaf}.key").read_bytes()))
        assert timedelta(days=364) < one.not_valid_after_utc - NOW <= timedelta(days=365)
        assert one.not_valid_before_utc < NOW, "clocks differ"
    late = NOW + timedelta(days=3600)
    fill(tmp_path, WantedSecrets(renew=True), late)
    assert certificate(tmp_path, "node").not_valid_after_utc == authority.not_valid_after_utc
    with pytest.raises(InvalidRequest, match="expired"):
        fill(tmp_path, WantedSecrets(renew=True), NOW + timedelta(days=3700))


def test_renewed_certificates_have_the_same_authority_keys_and_hosts(tmp_path: Path) -> None:
    make(tmp_path, hosts=("a.example", "b.example"))
    before = contents(tmp_path)
    later = NOW + timedelta(days=340)
    assert sorted(fill(tmp_path, WantedSecrets(), later).warnings) == [
        f"{leaf}.crt ends on {NOW + timedelta(days=365):%Y-%m-%d}" for leaf in LEAFS
    ]
    report = fill(tmp_path, WantedSecrets(renew=True), later)
    assert sorted(report.written) == sorted(f"{leaf}.crt" for leaf in LEAFS), "nats.env's pin is of the key"
    assert report.warnings == []
    assert contents(tmp_path)["ca.crt"] == before["ca.crt"]
    assert hosts_of(certificate(tmp_path, "nats")) == ("a.example", "b.example")
    assert certificate(tmp_path, "nats").not_valid_after_utc > NOW + timedelta(days=700)
    fill(tmp_path, WantedSecrets(hosts=("c.example",), renew=True, days=7), later)
    assert hosts_of(certificate(tmp_path, "nats")) == ("c.example",)
    (tmp_path / "nats.key").unlink()  # the way to a new key
    report = fill(tmp_path, WantedSecrets(renew=True), later)
    assert {"nats.key", "nats.crt", "nats.env"} <= set(report.written)


def test_what_was_handed_out_or_taken_away_is_not_made_again(tmp_path: Path) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    for name in ("ca.key", "nkeys/producer-acme.seed", "producer-acme.key", "api-key.txt"):
        (tmp_path / name).unlink()
    assert fill(tmp_path, WantedSecrets(), NOW).written == []
    with pytest.raises(InvalidRequest, match=r"^ca.key: is not there: it is needed to sign producer-beta.crt"):
        fill(tmp_path, WantedSecrets(tenants=("beta",)), NOW)
    assert "nkeys/producer-beta.seed" not in contents(tmp_path), "nothing by halves"
    (tmp_path / "ca.key").write_bytes(before["ca.key"])
    fill(tmp_path, WantedSecrets(tenants=("beta",)), NOW)


def test_force_makes_everything_anew(tmp_path: Path) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    fill(tmp_path, WantedSecrets(force=True), NOW)
    after = contents(tmp_path)
    assert after.keys() == before.keys(), "of the tenants that were there, too"
    assert all(after[name] != before[name] for name in before)


def test_the_first_api_key_is_one_that_the_ingress_takes(tmp_path: Path) -> None:
    make(tmp_path)
    key = (tmp_path / "api-key.txt").read_text().strip()
    text = (tmp_path / "api-keys.toml").read_text()
    assert key not in text
    found = asyncio.run(Tenancy(parse_keys(text), lambda: 0.0).authenticate(f"Bearer {key}"))
    assert (found.name, found.tenant, found.admin) == ("admin", "public", True)
    (tmp_path / "api-keys.toml").write_text(text + "# the operator's own\n")
    fill(tmp_path, WantedSecrets(), NOW)
    assert (tmp_path / "api-keys.toml").read_text().endswith("# the operator's own\n")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (WantedSecrets(hosts=("a b",)), "host: 'a b' is no host name or address"),
        (WantedSecrets(hosts=("*",)), "is no host name"),
        (WantedSecrets(hosts=("other.example",)), "host: nats.crt is there and names localhost, nats, 127.0.0.1"),
        (WantedSecrets(tenants=("a.b",)), "tenant: must be 1 to 64"),
        (WantedSecrets(tenants=("a-b", "a_b")), "tenant: a-b and a_b would have the same variable"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(tmp_path: Path, wanted: WantedSecrets, said: str) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        fill(tmp_path, wanted, NOW)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"ca.crt": None}, "ca.key: is there without ca.crt"),
        ({"ca.crt": None, "ca.key": None}, "nats.crt: is not signed by ca.crt"),
        ({"ca.key": "node.key"}, "ca.key: is not the key of ca.crt"),
        ({"node.key": "nats.key"}, "node.crt: is not that of node.key"),
        ({"node.crt": b"no"}, "node.crt: holds no certificate"),
        ({"node.key": b"no"}, "node.key: holds no private key"),
        ({"nkeys/worker.seed": b"SUNO"}, "nkeys/worker.seed: holds no nkey seed"),
        ({"nkeys/worker.seed": "nkeys/vault.seed"}, "nkeys/worker.pub: is not that of nkeys/worker.seed"),
    ],
)
def test_a_folder_that_is_mixed_up_is_refused(tmp_path: Path, damage: dict[str, str | bytes | None], said: str) -> None:
    make(tmp_path)
    for name, by in damage.items():
        if by is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(by if isinstance(by, bytes) else (tmp_path / by).read_bytes())
    before = contents(tmp_path)
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        fill(tmp_path, WantedSecrets(), NOW)
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot"):
        fill(tmp_path / "file", WantedSecrets(), NOW)


def test_the_command_tells_what_it_did_and_no_secret(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    first = CliRunner().invoke(app, ["secrets", "--out", str(folder), "--host", "nats.example", "--tenant", "acme"])
    assert first.exit_code == 0, first.output
    assert "32 files written, 0 kept" in first.output
    for name, data in contents(folder).items():
        if name not in ("nats.env", "api-keys.toml") and not name.endswith(".crt"):
            assert data.decode().strip() not in first.output
    again = CliRunner().invoke(app, ["secrets", "--out", str(folder), "--host", "elsewhere"])
    assert again.exit_code == 2
    assert "--renew-certificates" in again.output
    renewed = CliRunner().invoke(app, ["secrets", "--out", str(folder), "--renew-certificates", "--days", "30"])
    assert (renewed.exit_code, "4 files written" in renewed.output) == (0, True), renewed.output
