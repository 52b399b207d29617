"""/v1/files and /v1/batches, by the openai package and without it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from starlette.requests import Request as HttpRequest

from quire.errors import ConfigError
from quire.server.batch import batches, store
from quire.server.batch.results import Output
from quire.server.batch.store import Store
from quire.server.http.body import model_of
from quire.server.protocol.completions import CompletionRequest
from tests.fleet.gateways import Slowed, fronting, replicas, until
from tests.server.batches import mixed, on, request
from tests.server.serving import Serving, serving
from tests.test_weights import changed, saved

pytestmark = pytest.mark.slow
COMPLETIONS = "/v1/completions"


def client_of(server: Any, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    def slowly(service: Any) -> None:
        service.engine_client.engine.runner = Slowed(service.engine_client.engine.runner)

    directory = tmp_path_factory.mktemp("data")
    with serving({"async_scheduling": False}, slowly, data_dir=directory, api_key=("one", "two")) as running:
        yield running


def begun(client: OpenAI, lines: list[bytes], **given: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    body = {"endpoint": COMPLETIONS, "completion_window": "24h"} | given
    return client.batches.create(input_file_id=file.id, **body)


def when(client: OpenAI, batch: Batch, condition: Callable[[Batch], bool]) -> Batch:
    end = time.monotonic() + 60
    while not condition(found := client.batches.retrieve(batch.id)):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def ended(client: OpenAI, batch: Batch) -> Batch:
    return when(client, batch, lambda found: found.status not in ("validating", "in_progress", "cancelling"))


def results(client: OpenAI, batch: Batch) -> tuple[bytes, bytes]:
    names = batch.output_file_id, batch.error_file_id
    found = [b"" if name is None else client.files.content(name).read() for name in names]
    return found[0], found[1]


def completions(count: int) -> list[bytes]:
    return [request(i, COMPLETIONS, prompt=f"def f{i}", max_tokens=4) for i in range(count)]


def slow(server: Serving, seconds: float) -> None:
    server.service.engine_client.engine.runner.seconds = seconds


def test_a_batch(batching: Serving) -> None:
    """From the file to its results, which other keys do not see."""
    client, other = client_of(batching, "one"), client_of(batching, "two")
    lines = completions(30)
    lines[7] = b"{"
    lines[8] = request(8, "/v1/embeddings", input="a")
    batch = begun(client, lines, metadata={"name": "first"})
    assert (batch.status, batch.metadata) == ("validating", {"name": "first"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 30, "completed": 28, "failed": 2}
    answers, errors = ([json.loads(line) for line in found.splitlines()] for found in results(client, batch))
    assert [one["custom_id"] for one in answers] == [f"r{i}" for i in range(30) if i not in (7, 8)]
    assert [one["error"]["message"] for one in errors] == [
        "line 8: it is not JSON: Expecting property name enclosed in double quotes at character 1",
        f"line 9: url is '/v1/embeddings'; the endpoint of this batch is {COMPLETIONS}",
    ]
    files = list(client.files.list(limit=1))  # which asks page after page
    assert [one.id for one in files] == [batch.error_file_id, batch.output_file_id, batch.input_file_id]
    assert [one.id for one in client.files.list(order="asc", purpose="batch")] == [batch.input_file_id]
    assert client.files.retrieve(files[2].id).filename == "in.jsonl"
    assert client.files.content(files[2].id).read() == b"\n".join(lines)
    assert [one.id for one in client.batches.list()] == [batch.id]
    assert not list(other.files.list())
    assert not list(other.batches.list())
    for ask in (
        lambda: other.files.content(files[0].id),
        lambda: other.files.delete(files[0].id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(input_file_id=files[2].id, endpoint=COMPLETIONS, completion_window="1h"),
    ):
        with pytest.raises(openai.NotFoundError, match="of this key here"):
            ask()
    with pytest.raises(openai.ConflictError, match="is completed; only one that has not ended"):
        client.batches.cancel(batch.id)
    for file in files:
        assert client.files.delete(file.id).deleted
    assert not list(client.files.list())


def test_cancelled_and_expired(batching: Serving) -> None:
    """What was answered until then stays. Of an expired batch, each other line is an error."""
    client, lines = client_of(batching, "one"), completions(40)
    slow(batching, 0.02)
    try:
        batch = begun(client, lines)
        when(client, batch, lambda found: found.request_counts is not None and found.request_counts.completed > 0)
        with pytest.raises(openai.ConflictError, match=f"is the input of {batch.id}, which has not ended"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch)
        answers, errors = results(client, batch)
        assert batch.status == "cancelled"
        count = answers.count(b"\n")
        assert 0 < count < 40
        assert not errors
        slow(batching, 0.1)  # 40 lines of 4 tokens, of which 12 run at a time, take 1.6 s
        batch = ended(client, begun(client, lines, completion_window="1s"))
    finally:
        slow(batching, 0.0)
    assert batch.status == "expired"
    found = results(client, batch)
    answered, failed = ([json.loads(line) for line in part.splitlines()] for part in found)
    both = min(count, len(answered))
    assert answers.splitlines()[:both] == found[0].splitlines()[:both]
    assert sorted(int(one["custom_id"][1:]) for one in answered + failed) == [*range(40)]
    assert failed
    assert {one["error"]["code"] for one in failed} == {"batch_expired"}
    until(batching.is_idle)  # the aborted requests end with the engine's next step


def test_a_stopped_server_continues(tmp_path: Path) -> None:
    """With the bytes of a batch that was not interrupted; a directory has one server at a time."""

    def slowly(service: Any) -> None:
        service.engine_client.engine.runner = Slowed(service.engine_client.engine.runner)
        service.engine_client.engine.runner.seconds = 0.02

    options, lines = {"async_scheduling": False}, completions(40)
    with serving(options, slowly, data_dir=tmp_path) as server:
        client = client_of(server)
        batch = begun(client, lines)
        when(client, batch, lambda found: found.request_counts is not None and found.request_counts.completed > 3)
        with pytest.raises(ConfigError, match="is used by another server"):
            Store(tmp_path)
    (tmp_path / "files" / "file-stray.form").touch()
    with serving(options, data_dir=tmp_path) as server:
        assert not (tmp_path / "files" / "file-stray.form").exists()
        client = client_of(server)
        batch = ended(client, batch)
        again = ended(client, client.batches.create(
            input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
        ))  # fmt: skip
        assert batch.status == "completed"
        assert results(client, batch) == results(client, again)
        assert results(client, batch)[0].count(b"\n") == 40


def test_replaced_weights(tmp_path: Path) -> None:
    """A batch begins again, so that all its results are of the new ones."""

    def slowly(service: Any) -> None:
        engine = service.engine_client.engine
        use, engine.runner = engine.runner.use, Slowed(engine.runner)
        engine.runner.seconds, engine.runner.use = 0.02, use

    lines, weights = completions(40), saved(tmp_path / "new", changed(1))
    with serving({"async_scheduling": False}, slowly, data_dir=tmp_path / "data") as server:
        client = client_of(server)
        batch = begun(client, lines)
        when(client, batch, lambda found: found.request_counts is not None and found.request_counts.completed > 3)
        assert on(server, server.service.engine_client.update_weights(weights, "new")) == "new"
        batch = ended(client, batch)
        assert batch.status == "completed"
        assert results(client, batch)[0].count(b"\n") == 40
        assert results(client, batch) == results(client, ended(client, begun(client, lines)))


def test_wrong_requests(batching: Serving) -> None:
    client, headers = client_of(batching, "one"), {"Authorization": "Bearer one"}
    form = {"Content-Type": "multipart/form-data; boundary=b"} | headers

    def error_of(method: str, path: str, body: Any, given: dict[str, str]) -> tuple[int, str]:
        answer = batching.ask(method, path, body, given)
        return answer.status, answer.error()["message"]

    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    file, end = part % (b"file", b'; filename="a"', b"{}"), b"--b--\r\n"
    contents = batching.service.config.data_dir / "files"
    before = sorted(contents.iterdir())
    assert error_of("POST", "/v1/files", b"{}", headers | {"Content-Type": "application/json"}) == (
        400, "Content-Type is application/json; a file is sent as multipart/form-data with a boundary",
    )  # fmt: skip
    for body, message in (
        (b"", "the form is empty; it must have the fields file and purpose"),
        (b"--b\r\n", "the form ends in the middle of a part; send all of it"),
        (file[:-4], "the form ends in the middle of a part; send all of it"),
        (file + file[:-4], "the form ends in the middle of a part; send all of it"),
        (part % (b"purpose", b"", b"batch") + end, "file is missing; the form must have a field of that name"),
        (file + end, "purpose is missing; files are inputs of batches here, so it must be 'batch'"),
        (file + part % (b"purpose", b"", b"evals") + end, "purpose is 'evals'; files are inputs of batches here, so it "
         "must be 'batch'"),
        (file + part % (b"purpose", b"", b"batch") + part % (b"expires_after[seconds]", b"", b"3600") + end,
         "'expires_after[seconds]' is no field of an upload here; it has file and purpose"),
    ):  # fmt: skip
        assert error_of("POST", "/v1/files", body, form) == (400, message)
    assert sorted(contents.iterdir()) == before
    status, message = error_of("POST", "/v1/files", file + end, form | {"Origin": "https://evil.example"})
    assert (status, message[:46]) == (403, "the page https://evil.example may not use this")
    status, message = error_of("POST", "/v1/files", None, form | {"Content-Length": str(300 * 2**20)})
    assert status == 413
    for given, message in (
        ({"endpoint": "/v1/models"}, "endpoint is '/v1/models'; it must be '/v1/chat/completions', '/v1/completions', "
         "'/v1/embeddings' or '/v1/score'"),
        ({"completion_window": "soon"}, "completion_window is 'soon'; string should match pattern"),
        ({"input_file_id": "file-none"}, "there is no file 'file-none' of this key here"),
    ):  # fmt: skip
        body = {"input_file_id": "a", "endpoint": COMPLETIONS} | given
        assert error_of("POST", "/v1/batches", body, headers)[1].startswith(message)
    assert error_of("GET", "/v1/files?limit=0", None, headers) == (400, "limit is '0'; it must be at least 1")
    batch = ended(client, begun(client, [b"", b" "]))
    assert batch.status == "failed"
    assert batch.errors is not None
    [error] = batch.errors.data or ()
    assert error.message == f"the file {batch.input_file_id} has no line; each line must be a request"


def test_an_input_whose_content_is_gone(batching: Serving) -> None:
    client = client_of(batching, "one")
    file = client.files.create(file=("in.jsonl", b"\n".join(completions(3))), purpose="batch")
    (batching.service.config.data_dir / "files" / file.id).unlink()
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    batch = ended(client, batch)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    [error] = batch.errors.data or ()
    message = f"the content of the file {file.id} is missing on the server; upload it again"
    assert (error.code, error.message) == ("file_missing", message)


def test_a_key_has_a_limit_of_open_batches(batching: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_OPEN", 1)
    one, two = (client_of(batching, key).with_options(max_retries=0) for key in ("one", "two"))
    files = [
        client.files.create(file=("in.jsonl", b"\n".join(completions(40))), purpose="batch") for client in (one, two)
    ]

    def begin(client: openai.OpenAI, file: str) -> Any:
        return client.batches.create(input_file_id=file, endpoint=COMPLETIONS, completion_window="24h")

    first = begin(one, files[0].id)
    with pytest.raises(openai.RateLimitError, match="1 batches of this key have not ended, the most at a time"):
        begin(one, files[0].id)
    other = begin(two, files[1].id)  # of another key
    assert ended(one, first).status == ended(two, other).status == "completed"
    again = begin(one, files[0].id)
    assert ended(one, again).status == "completed"


def test_a_key_has_a_limit_of_stored_bytes(batching: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(batching, "one").with_options(max_retries=0)
    first = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    monkeypatch.setattr(batches, "MOST_STORED", first.bytes)
    with pytest.raises(openai.RateLimitError, match="so delete some"):
        client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    for one in client.files.list():
        client.files.delete(one.id)
    client.files.delete(client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch").id)


def test_a_cancelled_line_is_not_an_error(batching: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def cancelled() -> None:
        request = HttpRequest({"type": "http", "headers": [], "state": {}}, endless)
        body = model_of({"prompt": "a", "guided_regex": "b"}, CompletionRequest)
        task = asyncio.create_task(batching.service.guide(request, body))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(batching.service, "_guide", endless)
    asyncio.run(cancelled())


def test_an_upload_holds_up_nothing(batching: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered while a file is written to the disk."""
    client, sync, answers = client_of(batching, "one"), os.fsync, []

    def asking(fd: int) -> None:
        with suppress(OSError):
            answers.append(urllib.request.urlopen(f"{batching.url}/health", timeout=5).status)
        sync(fd)

    monkeypatch.setattr(os, "fsync", asking)
    client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    assert answers == [200]


def test_a_full_disk(batching: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload is refused; a batch waits until there is room."""
    client = client_of(batching, "two")
    file = client.files.create(file=("in.jsonl", b"\n".join(completions(6))), purpose="batch")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(batches, "AGAIN", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(openai.InternalServerError, match="cannot be written: No space left on device"):
            client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        patched.setattr(Output, "write", full)
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="1h")
        when(client, batch, lambda found: found.status == "in_progress")
        time.sleep(0.1)
        assert client.batches.retrieve(batch.id).status == "in_progress"
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert results(client, batch)[0].count(b"\n") == 6


def test_files_that_cannot_be_made(batching: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch waits for them; one that is cancelled or has expired ends with the results it has."""
    client = client_of(batching, "two")
    opened, written, parts = os.open, os.write, []

    def full(path: Any, *given: Any, **named: Any) -> int:
        if "file-output-" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return opened(path, *given, **named)

    def in_part(fd: int, data: Any) -> int:
        if "file-output-" not in os.readlink(f"/proc/self/fd/{fd}"):
            return written(fd, data)
        parts.append(written(fd, data[: max(1, 900 - os.fstat(fd).st_size)]))
        if os.fstat(fd).st_size >= 900:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return parts[-1]

    monkeypatch.setattr(batches, "AGAIN", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        waiting, cancelled = (begun(client, completions(3)) for _ in range(2))
        expired = begun(client, completions(3), completion_window="1s")
        assert client.batches.cancel(cancelled.id).status == "cancelling"
        cancelled, expired = ended(client, cancelled), ended(client, expired)
        assert (cancelled.status, expired.status) == ("cancelled", "expired")
        assert cancelled.output_file_id is expired.output_file_id is None
        assert client.batches.retrieve(waiting.id).status == "validating"
    assert ended(client, waiting).status == "completed"
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", in_part)
        slow(batching, 0.05)
        batch = begun(client, completions(20), completion_window="1s")
        batch = ended(client, batch)
        slow(batching, 0.0)
    assert batch.status == "expired"
    assert parts
    assert batch.request_counts is not None
    assert results(client, batch)[0].count(b"\n") == batch.request_counts.completed
    until(batching.is_idle)


def test_a_data_directory_that_cannot_be_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file cannot be used: Not a directory"):
        Store(tmp_path / "file")
    (tmp_path / "quire.sqlite").write_bytes(b"notes" * 1000)
    with pytest.raises(ConfigError, match=r"cannot be used: quire.sqlite: file is not a database"):
        Store(tmp_path)
    (tmp_path / "quire.sqlite").unlink()
    Store(tmp_path / "a" / "data").close()
    made = (tmp_path / "a" / "data", tmp_path / "a" / "data" / "files")
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700]
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    Store(tmp_path).close()
    for path in (private := (tmp_path / "files", tmp_path / "quire.sqlite")):
        path.chmod(0o777)
    held = Store(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in private] == [0o700, 0o600]
    held._database.execute(f"PRAGMA user_version = {store.VERSION + 1}")
    held.close()
    with pytest.raises(ConfigError, match="is of another version of Quire"):
        Store(tmp_path)


def test_without_a_data_directory(server: Serving) -> None:
    assert server.get("/v1/batches").status == 404
    assert "/v1/files" not in server.get("/openapi.json").json()["paths"]


def test_through_a_fleet(tmp_path: Path) -> None:
    """A gateway's replicas answer what a server of the same model answers."""
    lines = [line for line in mixed(60) if b"/v1/completions" in line]
    found = []
    with serving(data_dir=tmp_path / "alone") as server:
        client = client_of(server)
        found.append(results(client, ended(client, begun(client, lines))))
    with replicas(2) as servers, fronting(*(one.url for one in servers), data_dir=tmp_path / "fleet") as front:
        client = client_of(front)
        found.append(results(client, ended(client, begun(client, lines))))
    assert found[0][0].count(b"\n") > 10
    assert found[0] == found[1]
