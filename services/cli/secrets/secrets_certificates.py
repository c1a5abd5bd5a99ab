"""Adapter: the fleet's certificate authority and its certificates, by `cryptography`. No files and no clock.

Keys are P-256. The extensions are those of strict verifiers (Python's VERIFY_X509_STRICT, Go's crypto/x509).
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from inspect import signature

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvproto.errors import InvalidRequest

CA_DAYS = 3650
SKEW = timedelta(minutes=10)  # clocks of machines differ
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\Z")
_USAGES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: x509.Certificate
    key: Key


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def new_authority(name: str, now: datetime) -> Authority:
    """Self-signed for CA_DAYS; it may sign leafs and no further authorities."""
    key = new_key()
    subject = _name(name)
    builder = (
        _builder(subject, subject, key, now, now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Authority, name: str, key: Key, hosts: Sequence[str], usages: Sequence[str], now: datetime, days: int
) -> x509.Certificate:
    """`usages`: of `server` and `client`. The certificate never outlives the authority's. Raises InvalidRequest for
    a wrong host or an expired authority."""
    until = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    if until <= now:
        raise InvalidRequest(f"the CA expired on {until:%Y-%m-%d}; --force makes a new one, and everything anew")
    builder = (
        _builder(_name(name), authority.certificate.subject, key, now, until, authority.key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_USAGES[usage] for usage in usages]), critical=False)
        .add_extension(x509.SubjectAlternativeName([general_name(host) for host in hosts]), critical=False)
    )
    return builder.sign(authority.key, hashes.SHA256())


def general_name(host: str) -> x509.GeneralName:
    """An address, a DNS name, or one with a wildcard as its first label. Raises InvalidRequest."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not _HOST.match(host):
        raise InvalidRequest(f"{host[:80]!r} is no host name or address", field="host")
    return x509.DNSName(host.lower())


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def pin(holder: x509.Certificate | Key) -> str:
    """SHA-256 of its public key (SubjectPublicKeyInfo) in hex: nats-server's `pinned_certs`."""
    spki = holder.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_certificate(pem: bytes, name: str | None = None) -> x509.Certificate:
    """Raises InvalidRequest naming the file."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise InvalidRequest("holds no certificate (PEM)", field=name) from None


def read_key(pem: bytes, name: str | None = None) -> Key:
    """Raises InvalidRequest naming the file."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError):
        raise InvalidRequest("holds no private key (PEM, without a password)", field=name) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidRequest("is no elliptic curve key", field=name)
    return key


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(**permitted: bool) -> x509.KeyUsage:
    return x509.KeyUsage(**(dict.fromkeys(signature(x509.KeyUsage).parameters, False) | permitted))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Key, now: datetime, until: datetime, issuer_key: Key | None = None
) -> x509.CertificateBuilder:
    public = key.public_key()
    by = issuer_key.public_key() if issuer_key is not None else public
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by), critical=False)
    )
