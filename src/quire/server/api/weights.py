"""Routes that replace the weights and free the memory of a model. They have a separate key."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from quire.errors import ConfigError, ModelError
from quire.server.api.local_engine_client import LocalEngineClient
from quire.server.api.openapi import answer
from quire.server.api.service import Service
from quire.server.http.api_error import ApiError
from quire.server.http.body import BodyRoute
from quire.server.http.guard import ADMIN_PATHS
from quire.server.http.sse import JsonBody
from quire.server.protocol.weights import ReplacedWeights, Sleeping, UpdateWeightsRequest

SLEEP, WAKE_UP, IS_SLEEPING, UPDATE = ADMIN_PATHS


def router(engine_client: LocalEngineClient, service: Service) -> APIRouter:
    """Return the routes of ADMIN_PATHS: vLLM's of sleep, and SGLang's of weights in a directory."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post(UPDATE, response_model=None, responses=answer(ReplacedWeights, "The version of the new weights"))
    async def update_weights(body: UpdateWeightsRequest) -> Response:
        """Replace the weights between two steps. Running requests continue with the new ones."""
        try:
            version = await engine_client.update_weights(Path(body.model_path), body.weight_version)
        except ModelError as error:
            raise ApiError(str(error), param="model_path") from error
        except ConfigError as error:
            raise ApiError(str(error), param="weight_version") from error
        found: ReplacedWeights = {
            "success": True,
            "message": f"weights of version {version!r} are used from the next step on",
            "weight_version": version,
            "system_fingerprint": await service.system_fingerprint([]),
        }
        return JsonBody(found)

    @routes.post(SLEEP, response_class=Response)
    async def sleep(level: Annotated[int, Query()] = 1) -> Response:
        """Free the memory of the KV cache, at level 2 that of the weights as well. Running requests wait."""
        if getattr(service.config, "fleet_secret", None) is not None:
            message = "this is a replica of a fleet, which gateways expect to answer; drain it instead (/fleet/drain)"
            raise ApiError(message, HTTPStatus.CONFLICT)
        await engine_client.fingerprint()  # it is found with the weights
        try:
            await engine_client.llm.sleep(level)
        except ConfigError as error:
            raise ApiError(str(error), param="level") from error
        return Response()

    @routes.post(WAKE_UP, response_class=Response)
    async def wake_up() -> Response:
        """End the sleep. Weights that it dropped are read from their files."""
        try:
            await engine_client.llm.wake_up()
        except ModelError as error:
            raise ApiError(str(error), HTTPStatus.CONFLICT) from error
        return Response()

    @routes.get(IS_SLEEPING, response_model=None, responses=answer(Sleeping, "Whether the model sleeps"))
    async def is_sleeping() -> Sleeping:
        return {"is_sleeping": engine_client.is_sleeping}

    return routes
