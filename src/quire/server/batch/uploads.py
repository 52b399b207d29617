"""Uploads: forms with a file (multipart/form-data), which are kept on the disk while they arrive."""

from __future__ import annotations

import mmap
import os
from email.message import Message
from email.parser import BytesHeaderParser
from functools import partial
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request as HttpRequest

from quire.server.batch.runner import uninterrupted
from quire.server.http.api_error import ApiError, cut
from quire.server.http.guard import MAX_FILE_SIZE

MAX_FIELD = 1024  # bytes of a field that is no file


class Form(NamedTuple):
    """A form: the name of its file, and its other fields."""

    filename: str
    fields: dict[str, str]


async def receive(request: HttpRequest, target: Path) -> Form:
    """Write the file of a request's form to `target`. Raises ApiError for a form without one, and OSError."""
    header = Message()
    header["Content-Type"] = request.headers.get("content-type", "")
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        given = cut(request.headers.get("content-type", "missing"))
        raise ApiError(f"Content-Type is {given}; a file is sent as multipart/form-data with a boundary")
    whole = target.with_name(f"{target.name}.form")
    try:
        with whole.open("wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
        return await uninterrupted(partial(_read, whole, boundary.encode("latin-1", "replace"), target))
    finally:
        whole.unlink(missing_ok=True)


def _read(whole: Path, boundary: bytes, target: Path) -> Form:
    filename, fields = None, {}
    with whole.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ApiError("the form is empty; it must have the fields file and purpose")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            mark = b"--" + boundary
            start = data.find(mark)
            while start >= 0 and data[start + len(mark) : start + len(mark) + 2] == b"\r\n":
                begin, end = data.find(b"\r\n\r\n", start), data.find(b"\r\n" + mark, start + len(mark))
                if begin < 0 or end < 0 or begin > end:
                    raise ApiError("the form ends in the middle of a part; send all of it")
                headers = BytesHeaderParser().parsebytes(data[start + len(mark) + 2 : begin + 2])
                name = str(headers.get_param("name", "", "content-disposition"))
                if name == "file":
                    filename = (headers.get_filename() or "file").encode(errors="replace").decode()
                    _copy(data, begin + 4, end, target)
                else:
                    fields[name] = data[begin + 4 : min(end, begin + 4 + MAX_FIELD)].decode(errors="replace")
                start = end + 2
    if filename is None:
        raise ApiError("file is missing; the form must have a field of that name", param="file")
    return Form(filename, fields)


def _copy(data: mmap.mmap, begin: int, end: int, target: Path) -> None:
    if end - begin > MAX_FILE_SIZE:
        raise ApiError(f"the file has {end - begin} bytes; {MAX_FILE_SIZE} are the most", 413, param="file")
    with target.open("wb") as file:
        for at in range(begin, end, 2**20):
            file.write(data[at : min(end, at + 2**20)])
        file.flush()
        os.fsync(file.fileno())
