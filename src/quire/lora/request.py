"""LoRARequest: the adapter of a call, by its name and its directory."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import RequestError, check_integer

__all__ = ["LoRARequest"]


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter for `lora_request` of `LLM.generate` and others. It is loaded at its first use.

    Args:
        lora_name: the adapter's name, which identifies it here.
        lora_int_id: its number in vLLM, at least 1. It has no effect.
        lora_path: its directory, in PEFT's format.

    Raises:
        RequestError: an argument is invalid.

    Example:
        ```python
        from quire.lora.request import LoRARequest

        print(LoRARequest("sql", 1, "adapters/sql").lora_name)
        ```
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise RequestError(f"{name} is {value!r}; it must be a text of at least one character")
        check_integer(RequestError, "lora_int_id", self.lora_int_id, 1)
