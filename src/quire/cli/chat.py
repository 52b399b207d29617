"""quire chat: talk to a model in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import (
    ENGINE,
    OF_MANY,
    ApiKey,
    ModelName,
    fail,
    field_option,
    no_model,
    sampling_of,
    source_of,
    taken_model,
    with_options,
    with_sampling,
)
from quire.config import parse_loras
from quire.server.server_config import ServerConfig

if TYPE_CHECKING:
    from quire.terminal.partner import Partner

OF_EMBEDDED = 128  # new tokens of an answer of the embedded model, which rarely ends an answer
# One request at a time, in steps short enough that Ctrl-C takes effect soon.
ONE: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 512}


@with_options(*ENGINE, without=(*OF_MANY, "seed"))
@with_sampling(without=("n",), max_tokens=None)
def chat(
    context: typer.Context,
    model_name: ModelName = None,
    message: Annotated[
        str | None, typer.Argument(metavar="MESSAGE", help="Answer this alone, and end. - reads it from stdin.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to the OpenAI-compatible server there, and load no model here.")
    ] = None,
    api_key: ApiKey = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    chat_template: Annotated[Path | None, field_option(ServerConfig, "chat_template")] = None,
    lora: Annotated[str | None, typer.Option(help="NAME=PATH of a LoRA adapter that answers.")] = None,
    markdown: Annotated[bool, typer.Option(help="Render the markdown of answers, where the terminal can.")] = True,
    **options: Any,
) -> None:
    """Talk to a model in the terminal. Ctrl-C stops an answer; /help lists the commands."""
    sampling = sampling_of(options)
    if url is None:
        options["model"] = taken_model(context, model_name, options["model"])
        if options["model"] is None:
            sampling.setdefault("max_tokens", OF_EMBEDDED)
        text = _message(message)
        partner = _own_model(options, chat_template, sampling, lora)
    else:
        _check_served(context, url, options)
        from quire.terminal.client import Client
        from quire.terminal.partner import ServedModel

        client = Client(url, api_key)
        if message is None and model_name is not None and model_name not in ServedModel.names(client):
            model_name, message = None, model_name  # the only argument is the message
        text = _message(message)
        if model_name is None and source_of(context, "model") == "ENVIRONMENT":  # of this machine
            options["model"] = None
        partner = ServedModel(client, taken_model(context, model_name, options["model"]), sampling)
    from quire.terminal.chat import Chat
    from quire.terminal.display import console_at

    conversation = Chat(partner, console_at(), console_at(stderr=True), markdown, system)
    try:
        if text is not None:
            conversation.answer(text)
            return
        if url is None and options["model"] is None:
            conversation.note(no_model("quire chat"))
        conversation.note(f"{partner.name}{f', {partner.chosen}' if partner.chosen else ''}")
        conversation.note(_hint(partner))
        conversation.run()
    finally:
        partner.close()


def _message(given: str | None) -> str | None:
    """Return the single message to answer; None for a conversation."""
    if given not in (None, "-") or (given is None and sys.stdin.isatty()):
        return given
    text = sys.stdin.read()
    if not text.strip():
        fail('no message; give one, as in: quire chat MODEL "Explain paged attention."')
    return text


def _hint(partner: Partner) -> str:
    if not partner.has_template:
        return (
            "It has no chat template, so each text is continued on its own, without the earlier conversation; "
            "--chat-template FILE gives it one. /help lists the commands."
        )
    return "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends."


def _own_model(options: dict[str, Any], template: Path | None, sampling: dict[str, Any], lora: str | None) -> Partner:
    from quire import LLM
    from quire.terminal.partner import OwnModel

    loras = parse_loras([] if lora is None else [lora])
    llm = LLM(lora=loras, **ONE, **options)
    return OwnModel(llm, template, sampling, next(iter(loras), None))


def _check_served(context: typer.Context, url: str, options: dict[str, Any]) -> None:
    """Fail if an option is given that only a model of this process has."""
    for name in (*options, "chat_template", "lora"):
        if name != "model" and source_of(context, name) == "COMMANDLINE":
            fail(f"--{name.replace('_', '-')} is for a model that is loaded here; the one at {url} has its own")
