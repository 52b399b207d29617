"""Routes that load and unload LoRA adapters while the server runs. Their clients can make it read any directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from quire.errors import ConfigError, ModelError, RequestError
from quire.frontend.model_fingerprint import lora_digests
from quire.models.lora.fitting import prepare
from quire.server.api.local_engine_client import LocalEngineClient
from quire.server.api.service import ServedModel
from quire.server.http.api_error import ApiError
from quire.server.http.body import BodyRoute
from quire.server.protocol.lora import LoadLoraRequest, UnloadLoraRequest

T = TypeVar("T")


def router(engine_client: LocalEngineClient, model: ServedModel) -> APIRouter:
    """Return POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter, with vLLM's bodies and answers."""
    routes, llm = APIRouter(route_class=BodyRoute), engine_client.llm

    @routes.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadLoraRequest) -> Response:
        """Load an adapter, so that requests can use it as their model."""
        name, directory = body.lora_name, Path(body.lora_path)
        if name in model.names:
            raise ApiError(f"lora_name is {name!r}, which is the model's own name; choose another", param="lora_name")
        if name in model.loras and not body.load_inplace:
            message = f"there is an adapter {name!r} already; unload it first, or set load_inplace"
            raise ApiError(message, param="lora_name")
        try:
            # On another thread, so that other requests continue while its files are read.
            prepared = await asyncio.to_thread(prepare, llm.engine.known_loras(), directory)
        except (ModelError, ConfigError) as error:
            raise ApiError(str(error), param="lora_path") from error
        try:
            lora = await _change(
                engine_client, partial(llm.engine.load_lora, name, prepared, replace=body.load_inplace)
            )
        except ConfigError as error:
            raise ApiError(str(error), param="lora_name") from error
        model.loras[name] = str(lora.directory)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadLoraRequest) -> Response:
        """Unload an adapter. Running requests still finish with it."""
        try:
            await _change(engine_client, partial(llm.engine.unload_lora, body.lora_name))
        except RequestError as error:
            raise ApiError(str(error), HTTPStatus.NOT_FOUND, param="lora_name", code="model_not_found") from error
        model.loras.pop(body.lora_name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes


async def _change(engine_client: LocalEngineClient, function: Callable[[], T]) -> T:
    """Change the adapters on the engine's thread, and update the fingerprint of later answers."""

    def run() -> tuple[T, dict[str, str]]:
        return function(), lora_digests(engine_client.llm.llm)

    found, digests = await engine_client.llm.call(run)
    engine_client.use_adapters(digests)
    return found
