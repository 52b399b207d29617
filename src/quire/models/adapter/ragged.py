"""All sequences together: a step is one row of tokens with their positions, and Quire computes attention.

No masks are built, and transformers' cache is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from quire.errors import Unsupported
from quire.models.adapter.attention import NAME, AttentionStep, PagedPass, Pass, Passes, Recorder, attention
from quire.ops import Backend


class Together:
    """A way to run a step through a backbone: all sequences at once, with paged attention."""

    implementation = NAME  # of attention
    note = ""
    rows_depend: str | None = None  # this way does not affect batch invariance

    def __init__(self, backbone: Any, backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
        """Run the backbone with two tokens and record the attention calls of its layers.

        dtype: of keys and values. device: of the model, which may have no tensor left that shows it.

        Raises Unsupported, with the reason, if these calls cannot be served.
        """
        self._backbone, self._backend, self._dtype, self._passes = backbone, backend, dtype, Passes()
        for module in backbone.modules():
            module.quire_passes = self._passes
        recorder = Recorder()
        tokens = torch.zeros(2, dtype=torch.int64, device=device)
        with torch.inference_mode(), self._during(recorder):
            self.output = self._called(tokens, torch.arange(2, device=device))
        self.layers = tuple(recorder.calls)
        config = backbone.config.get_text_config()
        depth = config.num_hidden_layers
        if len(self.layers) != depth:
            raise Unsupported(f"its {depth} layers called attention {len(self.layers)} times; each must call it once")
        self.windows = self._windows(
            getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", None)
        )

    def _windows(self, kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
        """Return each layer's window. kinds: the config's layer types. window: that of sliding layers.

        Raises Unsupported if a layer of full attention asks for a window.
        """
        found = [layer.window for layer in self.layers]
        for i, kind in enumerate(kinds):
            if kind == "sliding_attention" and found[i] is None:
                found[i] = window
            if kind == "full_attention" and found[i] is not None:
                raise Unsupported(f"layer {i} is of full attention and asks for a window of {found[i]}")
        return tuple(found)

    def hidden(self, step: AttentionStep) -> Tensor:
        """Return the hidden states of all rows: [T, H]."""
        paged = PagedPass(self._backend, step, self.layers, self._dtype)
        with self._during(paged), step.current_lora.of(step.lora_rows):
            hidden: Tensor = self._called(step.token_ids, step.positions)[0][0]
        if paged.done != len(self.layers):
            raise Unsupported(f"the model called attention {paged.done} times; when it was loaded {len(self.layers)}")
        return hidden

    def _called(self, token_ids: Tensor, positions: Tensor) -> Any:
        return self._backbone(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)

    @contextmanager
    def _during(self, now: Pass) -> Iterator[None]:
        self._passes.current = now
        try:
            yield
        finally:
            self._passes.current = None


AttentionInterface.register(NAME, attention)
