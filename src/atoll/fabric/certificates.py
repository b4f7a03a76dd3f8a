"""Certificates, made and looked at: PEM in, PEM out. Nothing is written here.

One that signs itself is enough where learners know its fingerprint from the join link. An authority of one's own is for
those who want certificates of learners too (mutual TLS), or several syncers under one name.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.protocol.errors import ConfigError

_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
EARLY = timedelta(hours=1)
"""It counts from before now: clocks differ."""


@dataclass(frozen=True, slots=True)
class CertificateAndKey:
    """A certificate and its key."""

    certificate: bytes
    key: bytes


def make_server(hosts: Sequence[str], days: float, authority: CertificateAndKey | None = None) -> CertificateAndKey:
    """For a syncer that is reached under these names and addresses."""
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    return _made("atoll syncer", days, authority, [(names, False), (_usage(ExtendedKeyUsageOID.SERVER_AUTH), False)])


def make_client(name: str, days: float, authority: CertificateAndKey) -> CertificateAndKey:
    """For one learner."""
    return _made(name, days, authority, [(_usage(ExtendedKeyUsageOID.CLIENT_AUTH), False)])


def make_authority(days: float) -> CertificateAndKey:
    return _made("atoll authority", days, None, [], signs=True)


def fingerprint(pem: bytes) -> str:
    """SHA-256 of a certificate, in hex: what a join link pins."""
    try:
        found = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise ConfigError(f"this is no certificate in PEM: {error}") from error
    return hashlib.sha256(found.public_bytes(serialization.Encoding.DER)).hexdigest()


def short_fingerprint(der: bytes) -> str:
    """Enough of it for a person to compare."""
    return f"{hashlib.sha256(der).hexdigest()[:16]}…"


def signs_itself(pem: bytes) -> bool:
    found = x509.load_pem_x509_certificate(pem)
    return found.issuer == found.subject


def hosts_of(pem: bytes) -> list[str]:
    """The names and addresses that a certificate is for."""
    found = x509.load_pem_x509_certificate(pem)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(one.value) for one in names]


def out_of_date(der: bytes, now: datetime | None = None) -> str:
    """Why a certificate does not count now; empty: it does."""
    found, now = x509.load_der_x509_certificate(der), now or datetime.now(UTC)
    if now > found.not_valid_after_utc:
        return f"the certificate expired on {found.not_valid_after_utc:%Y-%m-%d}: make another with atoll cert"
    if now < found.not_valid_before_utc:
        return (
            f"the certificate counts from {found.not_valid_before_utc:%Y-%m-%d %H:%M} on: look at this machine's clock"
        )
    return ""


def days_left(der: bytes, now: datetime | None = None) -> float:
    """How long a certificate still counts; below 0: it does not."""
    end = x509.load_der_x509_certificate(der).not_valid_after_utc
    return (end - (now or datetime.now(UTC))) / timedelta(days=1)


def _made(
    name: str,
    days: float,
    authority: CertificateAndKey | None,
    extensions: list[tuple[x509.ExtensionType, bool]],
    *,
    signs: bool = False,
) -> CertificateAndKey:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signer = (subject, key) if authority is None else _signer(authority)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_key_usage(signs), critical=True)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    made = builder.sign(signer, hashes.SHA256())
    return CertificateAndKey(
        made.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _signer(authority: CertificateAndKey) -> tuple[x509.Name, ec.EllipticCurvePrivateKey]:
    key = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the authority's key is of another kind than atoll cert --ca makes")
    return x509.load_pem_x509_certificate(authority.certificate).subject, key


def _usage(which: x509.ObjectIdentifier) -> x509.ExtendedKeyUsage:
    return x509.ExtendedKeyUsage([which])


def _key_usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def is_host(name: str) -> bool:
    """Whether a certificate can be for it."""
    try:
        _general_name(name)
    except ConfigError:
        return False
    return True


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        name = host.encode("idna").decode()
    except UnicodeError:
        name = ""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{host!r} is no name or address of a machine: it looks like syncer.example.org")
    return x509.DNSName(name)
