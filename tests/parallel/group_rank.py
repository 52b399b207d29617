"""A rank of a group that a launcher has started: python -m tests.parallel.group_rank [apart]. Rank 0 prints an answer.

apart: the ranks cannot open the same memory, as on several hosts.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from quire import LLM, SamplingParams
from quire.parallel import group

_mapped = group.mapped


def _apart(descriptor: int, size: int) -> torch.Tensor:
    if os.environ["RANK"] == "0":
        return _mapped(descriptor, size)
    os.close(descriptor)
    raise FileNotFoundError


def main() -> None:
    if sys.argv[1:] == ["apart"]:
        group.mapped = _apart
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    with LLM(tensor_parallel_size=2, num_blocks=100, **options) as llm:
        assert llm.group is not None
        exchange = type(llm.group.exchange).__name__
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
        [found] = llm.generate([[7 * i % 500 for i in range(40)]], params, use_tqdm=False)
        print(json.dumps([exchange, list(found.outputs[0].token_ids), found.outputs[0].cumulative_logprob]))


if __name__ == "__main__":
    main()
