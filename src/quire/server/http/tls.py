"""Certificates of a server."""

from __future__ import annotations

import ssl
from pathlib import Path

from quire.errors import ConfigError


def server_context(certfile: Path | None, keyfile: Path | None, password: str | None) -> ssl.SSLContext | None:
    """Return the TLS settings for a certificate, or None without one. Versions below 1.2 are refused.

    certfile: PEM, the server's certificate and then those between it and its CA. keyfile: PEM of its private key; None:
    it is in the same file. password: of the key, if it is encrypted. Raises ConfigError if they cannot be used.
    """
    if certfile is None:
        for name, value in (("ssl_keyfile", keyfile), ("ssl_keyfile_password", password)):
            if value is not None:
                raise ConfigError(f"{name} is given without ssl_certfile; give both")
        return None
    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if path is not None:
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile, password or "")  # without a password OpenSSL would ask for one
    except ssl.SSLError as error:
        key = certfile if keyfile is None else keyfile
        raise ConfigError(
            f"the certificate of ssl_certfile {certfile} and the private key of {key} cannot be used "
            f"({error.reason or error}); they must be PEM and belong together, and an encrypted key needs "
            f"its password as ssl_keyfile_password (--ssl-keyfile FILE or QUIRE_SSL_KEYFILE, and "
            f"QUIRE_SSL_KEYFILE_PASSWORD)"
        ) from error
    return context
