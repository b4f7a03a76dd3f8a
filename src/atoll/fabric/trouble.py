"""What went wrong on the way to a syncer, in words that say where to look."""

from __future__ import annotations

import os
import ssl

import aiohttp

from atoll.fabric.wire import one_line

NOT_TLS = "it answers, but not in TLS: is that the port of a plain HTTP server?"
HUNG_UP = "it hung up without an answer: does it ask for a certificate (mutual TLS: --cert and --key)?"
"""TLS 1.3 refuses a certificate, or that there is none, only after the handshake, and who hangs up may say no more."""
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
_OURS_ASKED = ("CERTIFICATE_REQUIRED", "UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED")


def told(error: BaseException) -> str:
    """One line; a proxy that is at fault is named by its address, never with its password."""
    match error:
        case aiohttp.ClientProxyConnectionError():
            return f"the proxy {error.host}:{error.port} cannot be reached: {_system(error.os_error)}"
        case aiohttp.ClientHttpProxyError():
            where = error.request_info.real_url
            return one_line(
                f"the proxy {where.host}:{where.port} does not let us through: {error.status} {error.message}"
            )
        case aiohttp.ClientConnectorCertificateError():
            return told(error.certificate_error)
        case aiohttp.ClientConnectorError():
            return told(error.os_error)
        case aiohttp.ServerDisconnectedError():
            return HUNG_UP
        case ssl.SSLCertVerificationError():
            return one_line(getattr(error, "verify_message", "") or error.args[-1])
        case ssl.SSLError():
            return _tls(error)
        case OSError() if not isinstance(error, TimeoutError):
            return _system(error)
    return one_line(str(error) or type(error).__name__)


def _tls(error: ssl.SSLError) -> str:
    reason: str = getattr(error, "reason", "") or ""
    if any(word in reason for word in _NOT_TLS):
        return NOT_TLS
    if "ALERT" in reason and any(word in reason for word in _OURS_ASKED):
        return "it asks for a certificate that its authority made (mutual TLS): name ours with --cert and --key"
    return one_line(f"the TLS handshake failed: {reason.replace('_', ' ').lower() or error}")


def _system(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio has words of its own for some, and they say less
    return one_line(error.strerror or str(error) or type(error).__name__)
