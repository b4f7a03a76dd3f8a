"""TLS 1.3, and nothing older, on both sides.

A learner knows its syncer by the fingerprint in the join link, which is looked at before a single byte of ours is sent;
or, where it is given an authority, by a certificate of that authority for the name that was dialled. A certificate that
has expired counts for neither.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Sequence
from pathlib import Path

from atoll.protocol.errors import ConfigError


def server_context(certificate: Path, key: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    """`client_authority`: learners must bring a certificate of it (mutual TLS)."""
    from atoll.fabric.certificates import out_of_date  # what it needs is large, and a run on one machine needs none

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _strict(context)
    context.num_tickets = 0  # nothing is resumed: every connection shows what it knows
    try:
        context.load_cert_chain(certificate, key, _no_password)
        if client_authority is not None:
            context.load_verify_locations(client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
        late = out_of_date(first_certificate(certificate))
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(
            f"{certificate.parent} holds no usable certificate ({error}): atoll cert makes one"
        ) from error
    if late:
        raise ConfigError(f"{certificate}: {late}")
    return context


def client_context(
    pin: str, authority: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """By the fingerprint `pin`, or one of several with commas between them; by an authority where it is empty."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _strict(context)
    try:
        if pin:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint says more than a name
            context.sslobject_class = _pinned(pin.split(","))
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


def first_certificate(file: Path) -> bytes:
    """In DER, the syncer's own: those of its authorities may follow, and text may stand before it."""
    begin, end, pem = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----", file.read_text()
    return ssl.PEM_cert_to_DER_cert(pem[pem.index(begin) : pem.index(end) + len(end)])


def _pinned(pins: Sequence[str]) -> type[ssl.SSLObject]:
    """A connection whose handshake ends only with a certificate of one of these fingerprints, in date."""
    from atoll.fabric.certificates import out_of_date

    class Pinned(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            der = self.getpeercert(binary_form=True) or b""
            found = hashlib.sha256(der).hexdigest()
            if not any(hmac.compare_digest(found, pin) for pin in pins):
                named = " or ".join(f"{pin[:16]}…" for pin in pins)
                raise ssl.SSLCertVerificationError(
                    f"the syncer's certificate has fingerprint {found[:16]}…, the join link names {named}: "
                    "somebody else answers there, or the link is old"
                )
            if late := out_of_date(der):
                raise ssl.SSLCertVerificationError(late)

    return Pinned


def _no_password() -> str:
    """A key with a password is refused: nobody is there to type it."""
    raise ValueError("the key has a password: take one without")
