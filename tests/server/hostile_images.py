"""Hostile images and addresses of images, drawn from a seed."""

from __future__ import annotations

import random
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any

from quire.sandbox.images import MAX_PIXELS
from tests.models.image_checkpoints import pictures
from tests.server.web import Web

FORMS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
OTHER_FORMS = ("TIFF", "ICO", "PPM", "TGA", "PCX", "SGI", "JPEG2000", "DDS", "EPS", "PDF", "MPO", "XBM")
HEADS = (b"%PDF-1.7\n", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"PK\x03\x04", b"\x7fELF", b"<html><script>", b"<?xml?><svg>",
         b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff\xe0", b"RIFF\xff\xff\xff\xffWEBP", b"BM", b"II*\0",
         b"8BPS")  # fmt: skip
HOSTS = """127.0.0.1 localhost 0.0.0.0 [::1] [::ffff:127.0.0.1] 127.1 2130706433 0x7f.1 evil.example 169.254.169.254
    a.example.evil.example private.example turning.example a.example@127.0.0.1 127.0.0.1\\@a.example １２７.0.0.1
    evil.example#@a.example"""


@cache
def encoded(form: str, index: int) -> bytes:
    """Return a small valid image."""
    file, image = BytesIO(), pictures(4)[index]
    (image.convert("1") if form == "XBM" else image).save(file, form)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, color: int, *chunks: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def bomb(draw: random.Random) -> bytes:
    """Return a small file that says that it is large, or becomes large."""
    large = [draw.choice([0, 1, 2**13, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1]) for _ in range(2)]
    small = [min(side, 2**14 - 1) for side in large]
    zeros = chunk(b"IDAT", zlib.compress(bytes(draw.choice([0, 10, 2**20]))))
    return draw.choice(
        [
            lambda: png(*large, draw.choice([1, 2, 8, 16, 77]), draw.choice([0, 2, 3, 6, 9]), zeros),
            lambda: png(2**13, MAX_PIXELS // 2**13 + draw.randint(0, 1), 1, 0, zeros),
            lambda: png(8, 8, 8, 2, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**22))), zeros),
            lambda: png(8, 8, 8, 2, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**22))), zeros),
            lambda: png(8, 8, 8, 3, chunk(b"PLTE", bytes(draw.randint(0, 900))), *[zeros] * draw.randint(0, 9)),
            lambda: b"GIF89a" + struct.pack("<HHBBB", *[side % 2**16 for side in large], 0x80, 0, 0) + bytes(40),
            lambda: b"BM" + struct.pack("<IIIIiiHHIIiiII", 99, 0, 54, 40, *[side % 2**31 for side in large], 1,
                                        draw.choice([1, 8, 24, 32, 33]), draw.randint(0, 3), 0, 0, 0, 2**31, 0),
            lambda: b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0/" + struct.pack("<I", small[0] | small[1] << 14) + bytes(8),
            lambda: b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0" + bytes([255] * 6) + bytes(draw.randint(0, 99)),
        ]
    )()  # fmt: skip


def broken(draw: random.Random) -> bytes:
    """Return an image that is cut, or has other bytes at some places."""
    data = bytearray(encoded(draw.choice(FORMS), draw.randrange(4)))
    for _ in range(draw.randint(0, 6)):
        data[draw.randrange(len(data)) if draw.random() < 0.5 else draw.randrange(min(64, len(data)))] = draw.randrange(
            256
        )
    return bytes(data[: draw.randrange(len(data))] if draw.random() < 0.6 else data)


def other(draw: random.Random) -> bytes:
    """Return what is no image, or one of another form."""
    if draw.random() < 0.5:
        return encoded(draw.choice(OTHER_FORMS), draw.randrange(4))
    return draw.choice(HEADS) + draw.randbytes(draw.choice([0, 1, 20, 2000]))


def polyglot(draw: random.Random) -> bytes:
    """Return a file that several programs may take for theirs."""
    image = encoded(draw.choice(FORMS), draw.randrange(4))
    more = draw.choice(HEADS) + draw.choice([draw.randbytes(99), encoded(draw.choice(FORMS), 0)])
    return draw.choice([image + more, more + image, image[: draw.randrange(len(image))] + more])


def file(draw: random.Random) -> bytes:
    return draw.choice([bomb, broken, broken, other, polyglot])(draw)


def data_url(draw: random.Random) -> str:
    return f"data:image/{draw.choice(['png', 'jpeg', 'svg+xml', '../x'])};base64,{b64encode(file(draw)).decode()}"


def bad_data_url(draw: random.Random) -> Any:
    url = data_url(draw)
    at = draw.randrange(min(len(url), 60))
    inserted = url[:at] + draw.choice("!é\0\n ,;") + url[at:]
    objects = [None, draw.randint(0, 9), [], {}, True, [url], {"url": url}]
    return draw.choice(
        [url[:at], inserted, url.replace(";base64", ""), url[5:], "data:" + "a" * at, draw.choice(objects)]
    )


def forbidden(draw: random.Random, port: int) -> str:
    """Return an address that a server must not ask. port: where a request on this machine would be seen."""
    host = draw.choice(HOSTS.split())
    scheme = draw.choice(["http", "http", "https", "HTTP", "ftp", "file", "gopher", "unix", ""])
    place = draw.choice(["", f":{port}", f":{port}", ":22", ":x", ":99999"])
    return f"{scheme}{':' * bool(scheme)}//{host}{place}/{draw.choice(['', 'a.png', '../etc/passwd', '%0d%0aHost:x'])}"


def case(seed: int, site: Web, port: int) -> Any:
    """Return a hostile URL of an image. Its answers are added to the site, which serves a.example.

    port: see `forbidden`.
    """
    draw = random.Random(seed)

    def fetched(path: str) -> str:
        return f"http://a.example{path}"

    def redirected() -> str:
        path, to = f"/{seed}", f"/{seed}/to"
        site.redirects[path] = draw.choice([to, forbidden(draw, port), forbidden(draw, port), path, ""])
        site.redirects[to] = forbidden(draw, port)
        return fetched(path)

    def served() -> str:
        site.files[f"/{seed}"] = file(draw)
        return fetched(f"/{seed}")

    kinds: list[tuple[int, Callable[[], Any]]] = [
        (40, lambda: data_url(draw)),
        (10, lambda: bad_data_url(draw)),
        (20, lambda: forbidden(draw, port)),
        (20, redirected),
        (20, served),
        (2, lambda: fetched(draw.choice(["/endless", "/long", "/gzip", "/none", "/slow", "/slow-head"]))),
    ]
    [(_, make)] = draw.choices(kinds, [weight for weight, _ in kinds])
    return make()
