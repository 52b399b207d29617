"""Which requests are too large to ever run."""

from __future__ import annotations

from quire.cache.manager import BlockManager
from quire.errors import RequestError
from quire.request import Request, Task


def check_size(request: Request, longest: int, manager: BlockManager, max_model_len: int, max_num_seqs: int) -> None:
    """Raise RequestError, with the numbers, if the request would not fit were it alone. longest: see Scheduler."""
    if request.num_prompt < 1:
        raise RequestError(f"request {request.id} has an empty prompt; it needs at least one token", "prompt")
    is_drawn = request.task is Task.GENERATE  # the last token: it is never computed, and takes no slot
    if request.num_prompt > max_model_len - is_drawn:
        raise RequestError(
            f"request {request.id} has a prompt of {request.num_prompt} tokens; with max_model_len="
            f"{max_model_len} a prompt may have at most {max_model_len - is_drawn}",
            "prompt",
        )
    if is_drawn and (known := len(request.tokens) + len(request.to_check)) >= longest:
        raise RequestError(
            f"request {request.id} goes on after {known - request.num_prompt} delivered tokens, and ends at "
            f"{longest - request.num_prompt}; it must have fewer"
        )
    stored = longest - is_drawn
    needed = max(manager.most_blocks(stored, stored, group) for group in manager.groups)
    what = ""
    if request.driven and request.group is not None:  # its siblings go on side by side, or not at all
        width, shared = len(request.group.members), request.num_prompt // manager.block_size
        if width > max_num_seqs:
            raise RequestError(
                f"request {request.id} has {width} beams; with max_num_seqs={max_num_seqs} beam_width may be "
                f"at most {max_num_seqs}",
                "beam_width",
            )
        what = f" for each of {width} beams"
        windowed = any(group.window is not None for group in manager.groups)
        needed = width * needed if windowed else shared + width * (needed - shared)
    existing = manager.num_blocks
    if needed > existing:
        new = f" and up to {longest - request.num_prompt} new ones" if is_drawn else ""
        raise RequestError(
            f"request {request.id} can never fit: {request.num_prompt} prompt tokens{new}{what} need {needed} KV "
            f"blocks of {manager.block_size} tokens, and the cache has {existing}; "
            + ("lower max_tokens or " if is_drawn else "")
            + "give the cache more blocks"
            + (", or lower beam_width" if what else "")
            + (", or lower max_num_batched_tokens" if any(g.window for g in manager.groups) else ""),
            "beam_width" if what else "prompt",
        )
