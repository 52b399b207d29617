"""Reject requests that are too large to ever run."""

from __future__ import annotations

from quire.cache.groups import CacheGroup, RowGroup, StateGroup
from quire.cache.manager import BlockManager
from quire.errors import RequestError
from quire.request import Request, Task


def check_size(
    request: Request, longest: int, manager: BlockManager, max_model_len: int, max_num_seqs: int, max_tokens: int
) -> None:
    """Raise RequestError, with the numbers, if the request would not fit even alone.

    longest: see Scheduler. max_tokens: tokens of a step.
    """
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
            f"request {request.id} continues after {known - request.num_prompt} delivered tokens, and ends at "
            f"{longest - request.num_prompt}; it must have fewer"
        )
    if request.is_whole and request.num_prompt > max_tokens:
        raise RequestError(
            f"request {request.id} has a prompt of {request.num_prompt} tokens, whose hidden states are pooled and so "
            f"computed in one step; with max_num_batched_tokens={max_tokens} it may have at most {max_tokens}",
            "prompt",
        )
    most_rows = max_tokens - (max_num_seqs - 1)  # while all other sequences decode
    if request.images is not None and (rows := request.images.longest_run) > most_rows:
        raise RequestError(
            f"request {request.id} has an image of {rows} rows, which attend to one another and so are computed in one "
            f"step; with max_num_batched_tokens={max_tokens} and max_num_seqs={max_num_seqs} it may have at most "
            f"{max(most_rows, 0)}: raise max_num_batched_tokens to {rows + max_num_seqs - 1} or more",
            "prompt",
        )
    stored = longest - is_drawn
    most = [manager.most_blocks(stored, stored, g) for g in range(len(manager.groups))]
    what = ""
    if request.driven and request.group is not None:  # its siblings advance together or not at all
        width = len(request.group.members)
        if width > max_num_seqs:
            raise RequestError(
                f"request {request.id} has {width} beams; with max_num_seqs={max_num_seqs} beam_width may be "
                f"at most {max_num_seqs}",
                "beam_width",
            )
        what = f" for each of {width} beams"
        whole = request.num_prompt // manager.block_size
        # Of the states, only the prompt's is shared. Blocks that leave a window are not shared to the end.
        shared = [
            whole if type(g) is CacheGroup and g.window is None else type(g) is StateGroup for g in manager.groups
        ]
        most = [min(n, once) + width * max(0, n - once) for n, once in zip(most, shared, strict=True)]
    for group, pool, needed in zip(manager.groups, manager.pools, most, strict=True):
        if needed <= pool.num_blocks:
            continue
        new = f" and up to {longest - request.num_prompt} new ones" if is_drawn else ""
        blocks = {
            CacheGroup: f"KV blocks of {manager.block_size} tokens",
            StateGroup: "states",
            RowGroup: f"blocks of rows of {manager.unit} tokens",
        }[type(group)]
        raise RequestError(
            f"request {request.id} can never fit: {request.num_prompt} prompt tokens{new}{what} need {needed} "
            f"{blocks}, and the cache has {pool.num_blocks}; "
            + ("lower max_tokens or " if is_drawn else "")
            + "give the cache more blocks"
            + (", or lower beam_width" if what else "")
            + (", or lower max_num_batched_tokens" if group.window else ""),
            "beam_width" if what else "prompt",
        )
