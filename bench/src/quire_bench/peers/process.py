"""The process of an engine that is measured: the other side of `runners.protocol`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any

from quire_bench.peers.runners.protocol import Settings

PACKAGE = Path(__file__).absolute().parent.parent  # quire_bench
MOST_SECONDS = 1200.0  # that an answer may take
SECONDS_TO_LEAVE = 30.0


class Failed(Exception):
    """An engine did not do what it was asked."""


def runners_in(folder: Path) -> Path:
    """The folder, as the working directory in which any interpreter finds quire_bench, and no other package of ours."""
    (folder / PACKAGE.name).symlink_to(PACKAGE)
    return folder


class EngineProcess:
    """One engine's process. It runs only while it is asked something."""

    def __init__(self, command: Sequence[str], settings: Settings, log: Path) -> None:
        """Start it in the log's folder. `wait` for it before it is asked to run. Its other output goes to the log."""
        self._log = log
        threads = {"OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1"}
        with log.open("w") as said:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                cwd=log.parent,
                env=os.environ | threads,
                start_new_session=True,  # a group of its own: engines start processes that have to be stopped too
            )
        # Ends the group when this process is gone, however it ended: stopped engines would keep their memory for ever.
        self._guard = subprocess.Popen(
            ["sh", "-c", 'cat > /dev/null; kill -s KILL -- "-$1"', "guard", str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._tell(asdict(settings))

    def wait(self) -> str:
        """Until it is ready, then stop it. Its version. Raises Failed."""
        version = self._answer()["version"]
        self._signal(signal.SIGSTOP)
        return str(version)

    def run(self, prompts: Path, new_tokens: list[int]) -> float:
        """The seconds that it says it took. Raises Failed, also where other numbers of tokens came."""
        self._signal(signal.SIGCONT)
        self._tell(str(prompts))
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        if answer["new_tokens"] != new_tokens:
            came = sum(answer["new_tokens"])
            raise Failed(f"{came} new tokens; expected {sum(new_tokens)}, as many as each request asks for")
        return float(answer["seconds"])

    def close(self) -> None:
        """End it, by force if it does not go by itself."""
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=SECONDS_TO_LEAVE)
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._guard.kill()
        self._guard.communicate()

    def _tell(self, what: object) -> None:
        with suppress(BrokenPipeError):  # then there is no answer
            print(json.dumps(what), file=self._process.stdin, flush=True)

    def _answer(self) -> dict[str, Any]:
        limit = Timer(MOST_SECONDS, self._signal, [signal.SIGKILL])
        limit.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout else ""
        finally:
            limit.cancel()
        if not line:
            said = self._log.read_text(errors="replace").splitlines()[-20:] or ["nothing"]
            raise Failed("\n".join([f"no answer (limit {MOST_SECONDS:.0f} s); its last words: {said[-1]}", *said]))
        found: dict[str, Any] = json.loads(line)
        return found

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
