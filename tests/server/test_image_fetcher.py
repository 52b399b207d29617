"""Images at addresses: which hosts and addresses are asked, and what hostile answers cost."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import ConfigError, RequestError
from quire.server.http import image_fetcher
from quire.server.http.hosts import media_domains
from quire.server.http.image_fetcher import ImageFetcher, is_public
from tests.certificates import certificate
from tests.server.web import PUBLIC, Resolver, Web, web

A = "http://a.example"


@pytest.fixture(scope="module")
def site() -> Iterator[Web]:
    with web() as found:
        yield found


@pytest.fixture
def resolver(site: Web) -> Iterator[Resolver]:
    site.hosts.clear()
    yield (found := Resolver({"a.example": [PUBLIC], "b.example": [PUBLIC], "evil.example": [PUBLIC]}, site.port))
    found.end()


@pytest.fixture
def fetcher(resolver: Resolver) -> ImageFetcher:
    return ImageFetcher(media_domains(["a.example, B.example"]), resolver)


def fetch(fetcher: ImageFetcher, *urls: str) -> dict[str, bytes]:
    return asyncio.run(fetcher.fetch(urls))


def test_files_of_allowed_hosts_are_fetched_once_each(fetcher: ImageFetcher, resolver: Resolver, site: Web) -> None:
    site.files |= {"/1": b"one", "/2": b"two"}
    site.redirects |= {"/to-2": "/2", "/to-b": "http://B.Example/1", "/again": "/to-b", "/thrice": "/again"}
    urls = [f"{A}/1", f"{A}/1", "http://b.example.:80/2?q#f", f"{A}/to-2", f"{A}/thrice"]
    site.files["/2?q"] = b"asked"
    assert fetch(fetcher, *urls) == dict(zip(urls, [b"one", b"one", b"asked", b"two", b"one"], strict=True))
    assert set(resolver.asked) == {"a.example", "b.example"}
    assert len(site.hosts) == 1 + 1 + 2 + 4
    sent = {"host", "accept", "accept-encoding", "user-agent", "connection"}  # so no cookie and no referrer
    assert {name.lower() for name in site.headers[-1]} == sent


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://evil.example/1", "has the host 'evil.example', which --allowed-media-domains does not name"),
        ("http://sub.a.example/1", "has the host 'sub.a.example'"),
        ("http://a.example.evil.example/1", "has the host"),
        ("http://a.example@evil.example/1", "has a user or a password"),
        ("http://evil.example\\@a.example/1", "has a user or a password"),
        ("http://u:p@a.example/1", "has a user or a password"),
        ("http://:p@a.example/1", "has a user or a password"),
        ("http://a.example:8080/1", "has the port 8080; it must be 80 or 443"),
        ("http://a.example:0/1", "has the port 0"),
        ("http://a.example:" + "x" * 5000, "is invalid"),
        ("http://127.0.0.1/1", "has the host '127.0.0.1'"),
        ("http://[::ffff:127.0.0.1]/1", "has the host '::ffff:127.0.0.1'"),
        ("http://2130706433/1", "has the host '2130706433'"),
        ("http:///1", "has the host ''"),
        ("http:a.example", "has the host ''"),
        ("http://a.example%2f@evil.example/1", "has a user or a password"),
        ("http://a.example%00/1", "has the host 'a.example%00'"),
        ("//a.example/1", "must begin with data:, http:// or https://"),
        ("ftp://a.example/1", "must begin with data:, http:// or https://"),
        ("file:///etc/passwd", "must begin with"),
        ("gopher://a.example/_GET", "must begin with"),
        ("/etc/passwd", "must begin with"),
        ("http://a.example\r\nX: y/1", "is invalid"),
        ("http://а.example/1", "has the host 'а.example'"),  # the first letter is Cyrillic
        ("http://a.example/" + "a" * 9000, "has 9,017 characters; it must have at most 8,192"),
    ],
)
def test_other_addresses_are_refused(
    fetcher: ImageFetcher, resolver: Resolver, site: Web, url: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=f"of an image .*{re.escape(reason)}") as error:
        fetcher.check(url)
    assert len(str(error.value)) < 250
    assert (resolver.asked, site.hosts) == ([], [])


@pytest.mark.parametrize(
    "to",
    [
        "http://127.0.0.1/1",
        "http://169.254.169.254/latest/meta-data/",
        "http://evil.example/1",
        "//evil.example/1",
        "http://[::1]/1",
        "https://u:p@a.example/1",
        "http://a.example:22/1",
        "file:///etc/passwd",
        "http://a.example:x/",
    ],
)
def test_a_redirect_is_checked_as_the_first_address_is(
    fetcher: ImageFetcher, resolver: Resolver, site: Web, to: str
) -> None:
    site.redirects["/out"] = to
    with pytest.raises(RequestError, match=r"'http://a.example/out' of an image (redirects to|cannot be fetched)"):
        fetch(fetcher, f"{A}/out")
    assert (resolver.asked, site.hosts) == (["a.example"], ["a.example"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, True) for text in ("8.8.8.8", PUBLIC, "2606:4700::1111", "64:ff9b::808:808")),
        *((text, False) for text in ("127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1")),
        *((text, False) for text in ("169.254.169.254", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.1")),
        *((text, False) for text in ("198.18.0.1", "192.0.2.1", "192.88.99.1", "::", "::1", "fe80::1", "fe80::1%eth0")),
        *((text, False) for text in ("fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "2001::1")),
        *((text, False) for text in ("::ffff:8.8.8.8", "::ffff:127.0.0.1", "::127.0.0.1", "2002:7f00:1::")),
        *((text, False) for text in ("64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "3fff::1", "100::1")),
        *((text, False) for text in ("168.63.129.16", "64:ff9b::168.63.129.16")),
    ],
)
def test_only_public_addresses_are_connected_to(site: Web, text: str, expected: bool) -> None:
    assert is_public(text) == expected
    resolver = Resolver({"a.example": [text]}, site.port)
    site.hosts.clear()
    site.files["/1"] = b"one"
    fetcher = ImageFetcher(["a.example"], resolver)
    if expected:
        assert fetch(fetcher, f"{A}/1") == {f"{A}/1": b"one"}
    else:
        with pytest.raises(RequestError, match="its host has no public address"):
            fetch(fetcher, f"{A}/1")
        assert (resolver.used, site.hosts) == ([], [])
    resolver.end()


def test_a_name_that_changes_its_address_leads_to_no_private_one(
    fetcher: ImageFetcher, resolver: Resolver, site: Web
) -> None:
    """A name is resolved once for each connection, and the address that was checked is the one of the connection."""
    site.files["/1"], site.redirects["/to-1"] = b"one", "/1"
    resolver.names["a.example"] = [[PUBLIC], ["127.0.0.1"]]
    assert fetch(fetcher, f"{A}/1") == {f"{A}/1": b"one"}
    assert resolver.asked == ["a.example"]
    resolver.names["a.example"] = [[PUBLIC], ["127.0.0.1"]]
    with pytest.raises(RequestError, match="no public address"):
        fetch(fetcher, f"{A}/to-1")
    resolver.names["a.example"] = ["127.0.0.1", PUBLIC, "::1"]
    assert fetch(fetcher, f"{A}/1") == {f"{A}/1": b"one"}
    assert set(resolver.used) == {PUBLIC}
    with pytest.raises(RequestError, match="no public address"):  # unknown
        fetch(ImageFetcher(["c.example"], resolver), "http://c.example/1")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("endless", r"has more than 33,554,432 bytes"),
        ("long", r"has 1,099,511,627,776 bytes; an image must have at most 33,554,432"),
        ("slow", r"were not fetched within 0.3 seconds"),
        ("slow-head", r"were not fetched within 0.3 seconds"),
        ("none", r"cannot be fetched: the answer has the status 404"),
        ("round", r"redirects more than 3 times"),
        ("nowhere", r"redirects to another|redirects more than 3 times"),
    ],
)
def test_hostile_answers_are_refused(
    fetcher: ImageFetcher, site: Web, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.redirects |= {"/round": "/round", "/nowhere": ""}
    if path.startswith("slow"):
        monkeypatch.setattr(image_fetcher, "MAX_SECONDS", 0.3)
    with pytest.raises(RequestError, match=reason):
        fetch(fetcher, f"{A}/{path}")


def test_a_compressed_answer_is_not_expanded(fetcher: ImageFetcher) -> None:
    assert fetch(fetcher, f"{A}/gzip") == {f"{A}/gzip": b"abc"}


def test_the_images_of_a_prompt_have_a_limit_together(
    fetcher: ImageFetcher, site: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.files |= {f"/{i}": bytes(100) for i in range(3)}
    monkeypatch.setattr(image_fetcher, "MAX_TOGETHER", 299)
    assert len(fetch(fetcher, f"{A}/0", f"{A}/1", f"{A}/0")) == 2
    with pytest.raises(RequestError, match="more than 299 bytes together"):
        fetch(fetcher, *(f"{A}/{i}" for i in range(3)))


def test_a_certificate_is_checked_for_the_name(tmp_path: Path, resolver: Resolver) -> None:
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path))
    context.sni_callback = lambda _, name, __: asked.append(name)
    listening = socket.create_server(("127.0.0.1", 0))
    resolver.port = listening.getsockname()[1]

    def accept() -> None:
        with listening.accept()[0] as one, pytest.raises(OSError):
            context.wrap_socket(one, server_side=True).recv(1)

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(RequestError, match="its certificate is invalid"):
        fetch(ImageFetcher(["a.example"], resolver), "https://a.example/1")
    thread.join(60)
    listening.close()
    assert asked == ["a.example"]


NO_NAMES = "* *.a.example http://a.example a.example/x a.example:80 10.0.0.1 2130706433 [::1] a.example, é.example"


@pytest.mark.parametrize("given", ["", *NO_NAMES.split()])
def test_what_is_no_name_of_a_host_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="allowed_media_domains has"):
        media_domains([given])
