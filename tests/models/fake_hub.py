"""A hub on the loopback interface, with what huggingface_hub asks of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.loopback import Quiet, answering

Repositories = Mapping[str, Mapping[str, bytes]]  # the files of each, by their names


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def filled_from(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub fill this cache from that hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def fake_hub(repositories: Repositories) -> Iterator[str]:
    """The URL of one with these repositories. Each has one commit, which main and v1 name."""

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/models/"):
                self._describe(*path.removeprefix("api/models/").split("/"))
                return
            if path.count("/") < 4:  # something that this hub does not have
                self._answer(404, b"{}")
                return
            owner, name, _, revision, file = path.split("/", 4)
            data = repositories.get(f"{owner}/{name}", {}).get(file)
            if data is None or not _known(f"{owner}/{name}", revision):
                self._answer(404, b"{}", "EntryNotFound")
            else:
                self._answer(200, data, commit=commit_of(f"{owner}/{name}"))

        def _describe(self, owner: str, name: str, what: str = "revision", revision: str = "main", *_: str) -> None:
            repository = f"{owner}/{name}"
            files = repositories.get(repository)
            if files is None:
                self._answer(404, b"{}", "RepoNotFound")
            elif not _known(repository, revision):
                self._answer(404, b"{}", "RevisionNotFound")
            elif what == "tree":
                listed = [{"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                          for file, data in files.items()]  # fmt: skip
                self._answer(200, json.dumps(listed).encode())
            else:
                about = {"id": repository, "sha": commit_of(repository), "siblings": [{"rfilename": f} for f in files]}
                self._answer(200, json.dumps(about).encode())

        def _answer(self, status: int, body: bytes, error: str | None = None, commit: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            if commit:
                self.send_header("X-Repo-Commit", commit)
            if error is not None:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    def _known(repository: str, revision: str) -> bool:
        return revision in ("main", "v1", commit_of(repository))

    with answering(Handler) as url:
        yield url
