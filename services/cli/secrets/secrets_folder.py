"""A folder of a fleet's secrets. Missing files are made, existing ones are kept.

    ca.{crt,key}                     the fleet's own authority; the key is needed to sign, and nowhere else
    nats.{crt,key}                   NATS's servers
    node.{crt,key}                   the fleet's processes, to NATS and to one another
    producer-TENANT.{crt,key}        a tenant's producers, to NATS
    nkeys/USER.{seed,pub}            who is who at NATS
    nats.env                         what the server's configuration reads; holds nothing secret
    fleet.key                        tenants' cache salts follow from it
    api-keys.toml, api-key.txt       the first API key: its hash, and the key

A seed that was deleted here is not made again while its `.pub` is there, and `ca.key` may be kept elsewhere while
nothing has to be signed. Files are 0600 and appear whole.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import nkeys  # type: ignore[import-untyped]
from cryptography import x509

from kvfleet.cli.secrets import secrets_certificates as pki
from kvfleet.cli.secrets.key import toml_entry
from kvproto.errors import InvalidRequest, Unavailable
from kvproto.ids import DEFAULT_TENANT, is_token
from kvservice.private_files import write_private

ROLES = ("admin", "ingress", "placement", "worker", "vault", "sys", "region-link")
DEFAULT_HOSTS = ("localhost", "127.0.0.1", "nats")
NODE_NAME = "kvfleet-node"  # no host's: a process that is broken into cannot pose as NATS
LEAF_DAYS = 365
WARN_BEFORE = timedelta(days=30)
BOTH = ("server", "client")


@dataclass(frozen=True, slots=True)
class WantedSecrets:
    """`hosts`: of NATS; empty: those of the certificate that is there, else DEFAULT_HOSTS."""

    hosts: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    days: int = LEAF_DAYS
    renew: bool = False
    force: bool = False


@dataclass(slots=True)
class Report:
    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def fill(folder: Path, wanted: WantedSecrets, now: datetime) -> Report:
    """Raises InvalidRequest before anything is written, Unavailable for files that cannot be read or written."""
    return _Filling(folder, wanted, now).fill()


def variable(user: str) -> str:
    """`KVF_WORKER_NKEY`, `KVF_PRODUCER_acme_NKEY`: the name under which nats-server finds a user's public key."""
    role, tenant = ("producer", user.removeprefix("producer-")) if user.startswith("producer-") else (user, "")
    return "_".join(filter(None, ("KVF", role.upper(), tenant, "NKEY"))).replace("-", "_")


@dataclass(eq=False, slots=True)
class _Filling:
    folder: Path
    wanted: WantedSecrets
    now: datetime
    report: Report = field(default_factory=Report)
    new: dict[str, bytes] = field(default_factory=dict)

    def fill(self) -> Report:
        tenants = self._tenants()
        authority = self._authority()
        leafs = {"nats": self._nats_hosts(), "node": (NODE_NAME,)}
        leafs |= {f"producer-{tenant}": (f"producer-{tenant}",) for tenant in tenants}
        for name, hosts in leafs.items():
            self._leaf(name, hosts, ("client",) if name.startswith("producer-") else BOTH, authority)
        users = [*ROLES, *(f"producer-{tenant}" for tenant in tenants)]
        public = {user: self._nkey(user) for user in users}
        if self._read("fleet.key") is None:
            self.new["fleet.key"] = secrets.token_urlsafe(32).encode() + b"\n"
        else:
            self._keep("fleet.key")
        self._api_key()
        self._nats_env(public)
        self._write()
        return self.report

    def _read(self, name: str) -> bytes | None:
        """None: not there, or not to be kept."""
        return None if self.wanted.force else self._on_disk(name)

    def _on_disk(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"cannot read {self.folder / name}: {error.strerror}") from None

    def _keep(self, *names: str) -> None:
        self.report.kept += [name for name in names if (self.folder / name).exists()]

    def _tenants(self) -> list[str]:
        """The wanted ones and those of the folder."""
        for tenant in self.wanted.tenants:
            if not is_token(tenant):
                raise InvalidRequest(f"must be 1 to 64 of A-Z a-z 0-9 _ -, got {tenant[:80]!r}", field="tenant")
        there = {path.stem.removeprefix("producer-") for path in (self.folder / "nkeys").glob("producer-*")}
        tenants = sorted({DEFAULT_TENANT, *self.wanted.tenants, *there})
        named: dict[str, str] = {}
        for tenant in tenants:
            other = named.setdefault(variable(f"producer-{tenant}"), tenant)
            if other != tenant:
                raise InvalidRequest(f"{other} and {tenant} would have the same variable in nats.env", field="tenant")
        return tenants

    def _authority(self) -> pki.Authority | x509.Certificate:
        """Only the certificate where its key is not in the folder."""
        certificate, key = self._read("ca.crt"), self._read("ca.key")
        if certificate is None and key is None:
            new = pki.new_authority("kvfleet CA", self.now)
            self.new |= {
                "ca.crt": pki.certificate_pem(new.certificate),
                "ca.key": pki.key_pem(new.key),
            }
            return new
        if certificate is None:
            raise InvalidRequest("is there without ca.crt: put the certificate back, or move both away", field="ca.key")
        self._keep("ca.crt", "ca.key")
        read = pki.read_certificate(certificate, "ca.crt")
        self._warn_of_end("ca.crt", read)
        if key is None:
            return read
        own = pki.read_key(key, "ca.key")
        if pki.pin(read) != pki.pin(own):
            raise InvalidRequest("is not the key of ca.crt", field="ca.key")
        return pki.Authority(read, own)

    def _nats_hosts(self) -> tuple[str, ...]:
        asked = tuple(str(pki.general_name(host).value) for host in self.wanted.hosts)
        pem = self._on_disk("nats.crt")
        named = pki.hosts_of(pki.read_certificate(pem, "nats.crt")) if pem is not None and not self.wanted.force else ()
        if asked and named and set(asked) != set(named) and not self.wanted.renew:
            raise InvalidRequest(
                f"nats.crt is there and names {', '.join(named)}: --renew-certificates makes it anew", field="host"
            )
        return asked or named or DEFAULT_HOSTS

    def _leaf(
        self,
        name: str,
        hosts: tuple[str, ...],
        usages: tuple[str, ...],
        authority: pki.Authority | x509.Certificate,
    ) -> None:
        crt, key = f"{name}.crt", f"{name}.key"
        pem, key_file = self._read(crt), self._read(key)
        trusted = authority.certificate if isinstance(authority, pki.Authority) else authority
        own = pki.read_key(key_file, key) if key_file is not None else None
        if pem is not None and not self.wanted.renew:
            there = pki.read_certificate(pem, crt)
            if not pki.is_signed_by(there, trusted):
                raise InvalidRequest("is not signed by ca.crt: --renew-certificates makes it anew", field=crt)
            if own is not None and pki.pin(there) != pki.pin(own):
                raise InvalidRequest(f"is not that of {key}: --renew-certificates makes it anew", field=crt)
            self._warn_of_end(crt, there)
            self._keep(crt, key)  # the key may have been handed out
            return
        if not isinstance(authority, pki.Authority):
            raise InvalidRequest(f"is not there: it is needed to sign {crt}", field="ca.key")
        if own is None:
            own = _new_server_key() if name == "nats" else pki.new_key()
            self.new[key] = pki.key_pem(own)
        else:
            self._keep(key)
        self.new[crt] = pki.certificate_pem(pki.issue(authority, name, own, hosts, usages, self.now, self.wanted.days))

    def _warn_of_end(self, name: str, certificate: x509.Certificate) -> None:
        end = certificate.not_valid_after_utc
        if end - self.now < WARN_BEFORE:
            what = "ended" if end <= self.now else "ends"
            self.report.warnings.append(f"{name} {what} on {end:%Y-%m-%d}")

    def _nkey(self, user: str) -> str:
        """Returns the public key."""
        seed_file, public_file = f"nkeys/{user}.seed", f"nkeys/{user}.pub"
        seed, public = self._read(seed_file), self._read(public_file)
        if seed is None and public is None:
            seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER) + b"\n"
            self.new[seed_file] = seed
        if seed is None:
            self._keep(public_file)
            return (public or b"").decode("ascii", "replace").strip()
        derived = public_nkey(seed, seed_file)
        if public is None:
            self.new[public_file] = derived.encode() + b"\n"
        elif public.decode("ascii", "replace").strip() != derived:
            raise InvalidRequest(f"is not that of {seed_file}", field=public_file)
        self._keep(*(name for name in (seed_file, public_file) if name not in self.new))
        return derived

    def _api_key(self) -> None:
        """Once api-keys.toml exists it is the operator's, whatever it holds."""
        if self._read("api-keys.toml") is not None:
            self._keep("api-keys.toml", "api-key.txt")
            return
        given = self._read("api-key.txt")
        key = given.decode().strip() if given is not None else f"sk-{secrets.token_urlsafe(32)}"
        if given is None:
            self.new["api-key.txt"] = f"{key}\n".encode()
        self.new["api-keys.toml"] = toml_entry(key, "admin", DEFAULT_TENANT, True, None, {}).encode()

    def _nats_env(self, public: dict[str, str]) -> None:
        """Written whenever it differs from the keys and the certificate."""
        pem = self.new.get("nats.crt") or self._on_disk("nats.crt") or b""
        of = pki.pin(pki.read_certificate(pem, "nats.crt"))
        lines = [f"{variable(user)}={key}" for user, key in public.items()]
        lines.append(f"KVF_CLUSTER_PIN={of}" if of[0].isalpha() else f"KVF_CLUSTER_PIN='\"{of}\"'")
        text = ("\n".join(lines) + "\n").encode()
        if self._on_disk("nats.env") == text:
            self._keep("nats.env")
        else:
            self.new["nats.env"] = text

    def _write(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / "nkeys").mkdir(mode=0o700, exist_ok=True)
            for name, data in self.new.items():
                write_private(self.folder / name, data)
                self.report.written.append(name)
        except OSError as error:
            raise Unavailable(f"cannot write {error.filename or self.folder}: {error.strerror}") from None


def public_nkey(seed: bytes, name: str = "nkey seed") -> str:
    """Raises InvalidRequest if it is no user's seed."""
    try:
        public: str = nkeys.from_seed(bytearray(seed.strip())).public_key.decode()
    except (nkeys.NkeysError, ValueError, TypeError):
        raise InvalidRequest("holds no nkey seed (SU...)", field=name) from None
    if not public.startswith("U"):
        raise InvalidRequest("is the seed of something else than a user (SU...)", field=name)
    return public


def _new_server_key() -> pki.Key:
    """Its pin begins with a letter: nats-server wants quotes around another, which shells and kubectl read differently
    in env files."""
    while not pki.pin(key := pki.new_key())[0].isalpha():
        pass
    return key
