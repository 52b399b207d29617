"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from quire.server.protocol.body import Body, GivenName, Ignored, Off

MAX_PATH = 4096


class LoadLoraRequest(Body):
    """The body of /v1/load_lora_adapter."""

    lora_name: GivenName
    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATH)]  # a directory of the server
    load_inplace: Off = False  # replace a loaded adapter of this name


class UnloadLoraRequest(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: GivenName
    lora_int_id: Ignored[int] = None  # vLLM's number of the adapter, which its name identifies here
