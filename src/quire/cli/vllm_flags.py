"""Flags of `vllm serve` in pasted command lines: those without effect here are accepted, the others give a hint.

Flags of the engine are in `config.FOREIGN`, and become engine options of that name. The others are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.cli.config_file import Sourced
from quire.cli.options import fail
from quire.config import FOREIGN, ONE_DEVICE, Foreign

ABBREVIATED = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
# Flags without a value that ask for existing behaviour, and the flags that replace them.
HOLDS: dict[str, tuple[str, ...]] = {
    "--enable-prompt-tokens-details": (),
    "--enable-request-id-headers": (),
    "--disable-fastapi-docs": (),
    "--disable-log-requests": (),
    "--disable-log-stats": ("--no-log-stats",),
    "--disable-uvicorn-access-log": ("--no-access-log",),
    "--no-enable-log-requests": (),
}
PROXY = "leave it to a proxy in front of the server, such as nginx or caddy"
NO_GRAPHS = "sizes of graphs are chosen here; --enforce-eager captures none"
# Values of flags that ask for existing behaviour, and the hint for all other values.
HOLDS_AT: dict[str, tuple[tuple[str, ...], str]] = {
    "--api-server-count": (("1",), ONE_DEVICE),
    "--chat-template-content-format": (("auto", "string"), "templates receive contents as strings"),
    "--response-role": (("assistant",), "answers are the assistant's"),
    "--uvicorn-log-level": (("info", "warning"), "see --no-access-log and --no-log-stats"),
}
NOT_HERE = {
    "--collect-detailed-traces": "traces are sent with --otlp-traces-endpoint",
    "--cuda-graph-sizes": NO_GRAPHS,
    "--enable-force-include-usage": "clients ask for it, with stream_options.include_usage",
    "--enable-server-load-tracking": "/metrics has the numbers of requests that run and wait",
    "--kv-events-config": "the endpoint is --kv-events, the topic --kv-events-topic",
    "--lora-extra-vocab-size": "adapters cannot add tokens; leave it out",
    "--max-log-len": "with --enable-log-requests whole prompts are logged",
    "--middleware": "no code is loaded into the server",
    "--override-generation-config": "give --generation-config DIR, with a generation_config.json in it",
    "--return-tokens-as-token-ids": "tokens that are no valid text are shown as bytes",
    "--root-path": PROXY,
    "--speculative-model": "it is called --draft-model",
    "--ssl-ca-certs": PROXY,
    "--uds": PROXY,
}
SEVERAL = ("--served-model-name", "--allowed-media-domains")  # vLLM's take all values up to the next flag


PASTED = "quire.vllm_flags"  # key of vLLM's engine options in a context's meta


class PastedFlags(Sourced):
    """A command that accepts such flags. Its own options take precedence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments without vLLM's flags. Store those that are options of its engine in the context."""
        own = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        ctx.meta[PASTED] = {}
        return super().parse_args(ctx, list(_translated(args, own, ctx.meta[PASTED])))


def _translated(args: list[str], own: set[str], pasted: dict[str, Any]) -> Iterator[str]:
    """Yield the arguments for this command, and add vLLM's engine options to `pasted`. own: the command's options."""
    rest = iter(args)
    several = ""
    for arg in rest:
        if not arg.startswith("-"):
            if several:
                yield several
            yield arg
            continue
        flag, has_value, value = arg.partition("=")
        name = ABBREVIATED.get(flag, flag.replace("_", "-"))
        several = name if name in SEVERAL and not has_value else ""
        if several:
            continue
        if name in own:
            yield f"{name}={value}" if has_value else name
        elif name in HOLDS:
            yield from HOLDS[name]
        elif name in HOLDS_AT:
            taken, sentence = HOLDS_AT[name]
            given = value if has_value else next(rest, "")
            if given not in taken:
                fail(f"{flag} is {given!r}; {sentence}")
        elif (key := _foreign(name)) is not None:
            foreign, switch = FOREIGN[key], not name.startswith("--no-")
            given = value if has_value else str(switch) if _is_switch(foreign) else next(rest, "")
            pasted[key] = foreign.parse(given)
            if not foreign.accepts(pasted[key]):
                fail(foreign.refusal(f"option {flag}", given))
        elif name in NOT_HERE:
            fail(f"there is no option {flag} here; {NOT_HERE[name]}")
        else:
            yield arg


def _foreign(name: str) -> str | None:
    """Return the name in Python of an option of vLLM's engine; None if it is unknown."""
    plain = name.removeprefix("--").replace("-", "_")
    return next((key for key in (plain, plain.removeprefix("no_")) if key in FOREIGN), None)


def _is_switch(foreign: Foreign) -> bool:
    return any(isinstance(value, bool) for value in foreign.harmless)
