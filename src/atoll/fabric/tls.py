"""TLS 1.3, and nothing older, on both sides.

A learner knows its syncer by the fingerprint in the join link, which is looked at before a single byte of ours is sent;
or, where it is given an authority, by a certificate of that authority for the name that was dialled. A certificate that
has expired counts for neither.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path

from atoll.protocol.errors import ConfigError


def server_context(certificate: Path, key: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    """`client_authority`: learners must bring a certificate of it (mutual TLS)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _strict(context)
    context.num_tickets = 0  # nothing is resumed: every connection shows what it knows
    try:
        context.load_cert_chain(certificate, key, _no_password)
        if client_authority is not None:
            context.load_verify_locations(client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
        late = _late(certificate)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(
            f"{certificate.parent} holds no usable certificate ({error}): atoll cert makes one"
        ) from error
    if late:
        raise ConfigError(late)
    return context


def client_context(
    pin: str, authority: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """By the fingerprint `pin`; by an authority where it is empty."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _strict(context)
    try:
        if pin:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint says more than a name
            context.sslobject_class = _pinned(pin)
        elif authority is not None:
            context.load_verify_locations(authority)
        else:
            context.load_default_certs()
        if certificate is not None:
            context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificate files that were named cannot be used: {error}") from error
    return context


def _strict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION


def _pinned(pin: str) -> type[ssl.SSLObject]:
    """A connection whose handshake ends only with the certificate of this fingerprint, in date."""
    from atoll.fabric.certificates import out_of_date  # what it needs is large, and a run on one machine needs none

    class Pinned(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            der = self.getpeercert(binary_form=True) or b""
            found = hashlib.sha256(der).hexdigest()
            if not hmac.compare_digest(found, pin):
                raise ssl.SSLCertVerificationError(
                    f"the syncer's certificate has fingerprint {found[:16]}…, the join link names {pin[:16]}…: "
                    "somebody else answers there, or the link is old"
                )
            if late := out_of_date(der):
                raise ssl.SSLCertVerificationError(late)

    return Pinned


def _late(certificate: Path) -> str:
    from atoll.fabric.certificates import out_of_date

    begin, end, pem = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----", certificate.read_text()
    first = pem[pem.index(begin) : pem.index(end) + len(end)]  # text may stand before it
    return f"{certificate}: {late}" if (late := out_of_date(ssl.PEM_cert_to_DER_cert(first))) else ""


def _no_password() -> str:
    """A key with a password is refused: nobody is there to type it."""
    raise ValueError("the key has a password: take one without")
