"""The rate at which a replica gives its blocks to another one."""

from __future__ import annotations

import json
import random
import time
from array import array

from quire.cache.incoming import Arrivals, Name, Read
from quire.cache.prefix import block_digest, root_digest, root_salt
from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.peers import PeerSource
from quire.frontend.llm import LLM
from quire.request import Holder, Request
from quire_bench.fleet.running import Replica, fetch
from quire_bench.server.client import Server, completed
from quire_bench.server.prompts import Prompt, request_body
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, greedy

GIVEN = 16  # blocks


class GivenBlocks:
    """Blocks of a prompt that a replica has computed, to be read as another replica would."""

    def __init__(self, replica: Replica, secret: str, llm: LLM) -> None:
        """llm: of the same model and options. Raises QuireError where the replica does not answer."""
        hello = json.loads(fetch(f"{replica.url}/fleet/model", None, {"Authorization": f"Bearer {secret}"}))["hello"]
        size, widths = hello["block_size"], llm.engine.runner.cache.widths()
        tokens = array("i", random.choices(range(FIRST_TOKEN, VOCABULARY), k=GIVEN * size + 1))
        body = request_body(Prompt(tokens.tolist(), 1), "completions", "", {"temperature": 0.0, "ignore_eos": True})
        completed(Server(replica.url), [body], [0.0])
        self._blocks: list[tuple[Name, bytes, bytes]] = []  # each with its parent and tokens
        digest = root_digest(root_salt(hello["salt"], "", ""))
        for start in range(0, GIVEN * size, size):
            part, parent = tokens[start : start + size].tobytes(), digest
            digest = block_digest(parent, part)
            self._blocks += [(Name(group, digest), parent, part) for group in range(len(widths))]
        self._request = Request("any", tokens, len(tokens), greedy(1))
        self._request.holder = Holder(replica.url, GIVEN)
        self._arrivals = Arrivals()
        self._source = PeerSource(self._arrivals, widths, Fingerprint.from_json(hello["fingerprint"]).digest, secret)

    def read(self) -> float:
        """Seconds a byte of reading all of them; 0: the replica sends none."""
        self._source.read(self._request, [Read(*block, depth) for depth, block in enumerate(self._blocks)])
        start = time.perf_counter()
        self._source.read_next()
        seconds = time.perf_counter() - start
        num_bytes = sum(read.payload.nbytes for read in self._arrivals.take() if read.payload is not None)
        return seconds / num_bytes if num_bytes else 0.0
