"""Bodies and answers of /v1/files and /v1/batches, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from quire.server.http.api_error import Answer
from quire.server.protocol.body import Body, GivenName

MAX_METADATA, MAX_VALUE = 16, 512  # entries, and characters of one; OpenAI's limits
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score"]
Status = Literal["validating", "in_progress", "completed", "failed", "expired", "cancelling", "cancelled"]


class BatchRequest(Body):
    """The body of POST /v1/batches."""

    input_file_id: GivenName
    endpoint: Endpoint
    completion_window: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,5}[smhd]$")] = "24h"
    metadata: (
        Annotated[
            dict[GivenName, Annotated[str, StringConstraints(max_length=MAX_VALUE)]], Field(max_length=MAX_METADATA)
        ]
        | None
    ) = None


class File(Answer):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class Files(Answer):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Answer):
    """The answer of DELETE /v1/files/{id}."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Answer):
    """A reason why a batch has failed."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Answer):
    """The reasons why a batch has failed."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Answer):
    """The numbers of lines: all, answered, and in the file of errors."""

    total: int
    completed: int
    failed: int


class Batch(Answer):
    """A batch. The times are in seconds since 1970, and null until they are reached."""

    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class Batches(Answer):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
