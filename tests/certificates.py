"""Self-signed certificates for 127.0.0.1."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PASSWORD = "a password"


def certificate(directory: Path, name: str = "server", encrypted: bool = False) -> tuple[Path, Path]:
    """The PEM files of a certificate and of its key. encrypted: with PASSWORD."""
    if shutil.which("openssl") is None:
        pytest.skip("this machine has no openssl")
    cert, key = directory / f"{name}.pem", directory / f"{name}-key.pem"
    secret = ["-passout", f"pass:{PASSWORD}"] if encrypted else ["-noenc"]
    subject = ["-subj", "/CN=quire", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *secret, *subject]
    subprocess.run([*command, "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True)
    return cert, key
