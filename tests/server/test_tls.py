"""HTTPS: what a server with a certificate answers, and which files are refused."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from quire.errors import ConfigError, QuireError
from quire.server.server_config import ServerConfig
from quire.terminal.client import Client
from tests.certificates import PASSWORD, certificate
from tests.server.collected import until
from tests.server.serving import Serving, serving


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(files: tuple[Path, Path]) -> Iterator[Serving]:
    with serving(ssl_certfile=files[0], ssl_keyfile=files[1]) as running:
        yield running


@pytest.fixture
def url(server: Serving) -> str:
    return server.url.replace("http:", "https:")


def test_a_client_that_trusts_the_certificate_is_answered(
    server: Serving, url: str, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting = ssl.create_default_context(cafile=str(files[0]))
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30, context=trusting) as answer:
        assert json.load(answer)["data"][0]["id"] == "quire-embedded"
    with pytest.raises(QuireError, match=r"certificate of https://.* is not trusted \(.*SSL_CERT_FILE"):
        Client(url).get("/version")
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    body = {"prompt": "import os\n", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    *events, last = Client(url).events("/v1/completions", {**body, "stream": True})
    assert last == "[DONE]"
    streamed = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30, context=trusting) as answer:
        assert streamed == json.load(answer)["choices"][0]["text"]


def test_a_client_that_hangs_up_ends_its_request(server: Serving, files: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=str(files[0]))
    body = b'{"prompt": "x", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    with (
        socket.create_connection((server.host, server.port), 30) as plain,
        trusting.wrap_socket(plain, server_hostname="127.0.0.1") as client,
    ):
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        assert client.recv(1) == b"H"
    until(server.is_idle)


def test_older_versions_and_plain_http_get_no_answer(server: Serving) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
    for newest, is_served in ((ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_1, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.maximum_version = newest
        with (
            socket.create_connection((server.host, server.port), 30) as plain,
            nullcontext() if is_served else pytest.raises(ssl.SSLError),
        ):
            assert context.wrap_socket(plain).version() == "TLSv1.2"
    with pytest.raises((OSError, QuireError)):
        Client(server.url).get("/version")
    assert server.is_idle()


def test_an_encrypted_key_and_one_file_for_both_are_taken(files: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, encrypted=True)
    assert ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_keyfile_password=PASSWORD).tls is not None
    both = tmp_path / "both.pem"
    both.write_text(files[0].read_text() + files[1].read_text())
    assert ServerConfig(ssl_certfile=both).tls is not None
    assert ServerConfig().tls is None


def test_files_that_cannot_be_used_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    other_cert, encrypted = certificate(tmp_path, encrypted=True)
    text = tmp_path / "text"
    text.write_text("no PEM")
    nowhere = tmp_path / "nowhere"
    cert, key = files
    for options, words in (
        ({"ssl_keyfile": key}, "ssl_keyfile is given without ssl_certfile; give both"),
        ({"ssl_keyfile_password": "x"}, "ssl_keyfile_password is given without ssl_certfile"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "fleet_secret": "s"}, "does not go with fleet_secret"),
        ({"ssl_certfile": nowhere}, f"ssl_certfile {nowhere} cannot be read: No such file"),
        ({"ssl_certfile": cert, "ssl_keyfile": nowhere}, f"ssl_keyfile {nowhere} cannot be read"),
        (
            {"ssl_certfile": text, "ssl_keyfile": key},
            f"certificate of ssl_certfile {text} and the private",
        ),
        ({"ssl_certfile": cert}, "they must be PEM and belong together"),
        ({"ssl_certfile": other_cert, "ssl_keyfile": key}, "KEY_VALUES_MISMATCH"),
        ({"ssl_certfile": other_cert, "ssl_keyfile": encrypted}, "its password as ssl_keyfile_password"),
        ({"ssl_certfile": other_cert, "ssl_keyfile": encrypted, "ssl_keyfile_password": "x"}, "QUIRE_SSL_KEYFILE"),
    ):
        with pytest.raises(ConfigError) as refused:
            ServerConfig(**options)  # type: ignore[arg-type]
        assert words in str(refused.value)
