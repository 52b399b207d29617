"""/v1/files and /v1/batches, in OpenAI's format. A client sees those of its key."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from quire.server.api.derived import DerivedModels
from quire.server.api.openapi import answer
from quire.server.api.service import Service
from quire.server.batch import uploads
from quire.server.batch.batches import Batches
from quire.server.batch.store import BATCH, FILE, Store
from quire.server.http.api_error import ApiError, shown
from quire.server.http.body import BodyRoute
from quire.server.http.guard import client_of
from quire.server.http.sse import JsonBody
from quire.server.protocol import batches as protocol
from quire.server.protocol.batches import BatchRequest, DeletedFile, File, Files

FIELDS = {"file": {"type": "string", "contentMediaType": "application/octet-stream"}, "purpose": {"const": "batch"}}
UPLOAD = {"type": "object", "properties": FIELDS, "required": ["file", "purpose"], "additionalProperties": False}
FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}}
CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}
Limit = Annotated[int, Query(ge=1, le=10_000)]


def routers(service: Service) -> list[APIRouter]:
    """Return the routes of files and batches, if the server has a data directory. Raises ConfigError."""
    directory: Path | None = service.config.data_dir
    if directory is None:
        return []
    store = Store(directory)
    if service.config.ollama:
        service.derived = DerivedModels(store)
    return [_router(Batches(service, store))]


def _router(batches: Batches) -> APIRouter:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batches.start()
        yield
        await batches.stop()

    routes, store = APIRouter(route_class=BodyRoute, lifespan=lifespan), batches.store

    @routes.post("/v1/files", response_model=None, responses=answer(File, "The file"), openapi_extra=FORM)
    async def create_file(request: HttpRequest) -> Response:
        """Upload a file of requests."""
        request.app.state.bodies.check_page(request)
        batches.check_room(client_of(request))
        name = f"file-{uuid.uuid4().hex}"
        with _writing(), _kept(store.content(name)):
            form = await uploads.receive(request, store.content(name))
            purpose = form.fields.get("purpose")
            if purpose != "batch" or form.fields.keys() - {"purpose"}:
                raise _refused(form, purpose)
            return JsonBody(batches.add_file(client_of(request), name, form.filename))

    @routes.get("/v1/files", response_model=None, responses=answer(Files, "A page of files"))
    async def list_files(
        request: HttpRequest,
        after: str | None = None,
        limit: Limit = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """List files, the last one first unless `order` is asc."""
        found = store.listed(client_of(request), FILE, after, limit + 1, oldest_first=order == "asc", purpose=purpose)
        return JsonBody(_page(found[:limit], len(found) > limit))

    @routes.get("/v1/files/{file_id}", response_model=None, responses=answer(File, "The file"))
    async def get_file(request: HttpRequest, file_id: str) -> Response:
        """Show a file."""
        return JsonBody(batches.file(client_of(request), file_id))

    @routes.get("/v1/files/{file_id}/content", response_class=Response, responses=CONTENT)
    async def get_content(request: HttpRequest, file_id: str) -> Response:
        """Read a file."""
        found = batches.file(client_of(request), file_id)
        return FileResponse(store.content(file_id), media_type="application/octet-stream", filename=found["filename"])

    @routes.delete("/v1/files/{file_id}", response_model=None, responses=answer(DeletedFile, "It is deleted"))
    async def delete_file(request: HttpRequest, file_id: str) -> Response:
        """Delete a file."""
        with _writing():
            batches.delete(client_of(request), file_id)
        return JsonBody(DeletedFile(id=file_id, object="file", deleted=True))

    @routes.post("/v1/batches", response_model=None, responses=answer(protocol.Batch, "The batch"))
    async def create_batch(request: HttpRequest, body: BatchRequest) -> Response:
        """Begin a batch."""
        with _writing():
            return JsonBody(batches.create(client_of(request), body))

    @routes.get("/v1/batches", response_model=None, responses=answer(protocol.Batches, "A page of batches"))
    async def list_batches(request: HttpRequest, after: str | None = None, limit: Limit = 20) -> Response:
        """List batches, the last one first."""
        owner = client_of(request)
        found = store.listed(owner, BATCH, after, limit + 1)
        return JsonBody(_page([batches.get(owner, one["id"]) for one in found[:limit]], len(found) > limit))

    @routes.get("/v1/batches/{batch_id}", response_model=None, responses=answer(protocol.Batch, "The batch"))
    async def get_batch(request: HttpRequest, batch_id: str) -> Response:
        """Show a batch, with the numbers of its lines so far."""
        return JsonBody(batches.get(client_of(request), batch_id))

    @routes.post("/v1/batches/{batch_id}/cancel", response_model=None, responses=answer(protocol.Batch, "The batch"))
    async def cancel_batch(request: HttpRequest, batch_id: str) -> Response:
        """Cancel a batch. Its answers so far are kept."""
        with _writing():
            return JsonBody(batches.cancel(client_of(request), batch_id))

    return routes


@contextmanager
def _writing() -> Iterator[None]:
    """Turn the error of a disk into one for the client."""
    try:
        yield
    except OSError as error:
        message = f"the data directory cannot be written: {error.strerror}"
        raise ApiError(message, HTTPStatus.INSUFFICIENT_STORAGE, code="disk_full") from error


@contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Keep a file only if the upload of it succeeds."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _refused(form: uploads.Form, purpose: str | None) -> ApiError:
    if purpose != "batch":
        given = "missing" if purpose is None else shown(purpose)
        return ApiError(f"purpose is {given}; files are inputs of batches here, so it must be 'batch'", param="purpose")
    name = min(form.fields.keys() - {"purpose"})
    return ApiError(f"{shown(name)} is no field of an upload here; it has file and purpose", param=name)


def _page(found: list[Any], has_more: bool) -> dict[str, Any]:
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"object": "list", "data": found, "first_id": first, "last_id": last, "has_more": has_more}
