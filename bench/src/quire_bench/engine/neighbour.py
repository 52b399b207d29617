"""A process that decodes without end, beside one that is measured. python -m quire_bench.engine.neighbour OPTIONS"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire_bench.workloads import FIRST_TOKEN

SEQUENCES = 8
CONTEXT = 128  # tokens at the start
READY = "ready\n"


class Neighbour:
    """The process, which stands still until `go_on`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def stop(self) -> None:
        """Let it compute nothing."""
        os.kill(self._pid, signal.SIGSTOP)
        time.sleep(0.01)  # until it has noticed

    def go_on(self) -> None:
        """Let it decode."""
        os.kill(self._pid, signal.SIGCONT)
        time.sleep(0.05)


@contextmanager
def neighbour(options: Mapping[str, Any]) -> Iterator[Neighbour]:
    """One with an engine of those options, and as many threads as this process. It ends with the block.

    Raises QuireError where it does not get ready.
    """
    command = [sys.executable, "-m", "quire_bench.engine.neighbour", json.dumps(dict(options))]
    threads = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=threads) as process:
        try:
            if process.stdout is None or process.stdout.readline() != READY:
                raise QuireError("the process that is to decode beside this one did not get ready")
            found = Neighbour(process.pid)
            found.stop()
            yield found
        finally:
            process.kill()


def main() -> None:
    """Decode until somebody ends it."""
    llm = LLM(num_speculative_tokens=0, **json.loads(sys.argv[1]))
    new = min(512, llm.decoder.max_model_len - CONTEXT - 1)
    prompts = [{"prompt_token_ids": [FIRST_TOKEN + i] * CONTEXT} for i in range(SEQUENCES)]
    asked = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
    sys.stdout.write(READY)
    sys.stdout.flush()
    while True:
        llm.generate(prompts, asked, use_tqdm=False)


if __name__ == "__main__":
    main()
