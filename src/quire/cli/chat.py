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
    source_of,
    taken_model,
    with_options,
)
from quire.config import parse_loras
from quire.server.server_config import ServerConfig

if TYPE_CHECKING:
    from quire.terminal.partner import Partner

# One request at a time, in steps short enough that Ctrl-C takes effect soon.
ONE: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 512}


@with_options(*ENGINE, without=OF_MANY)
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
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of an answer. Default: the model's own, else all that fit."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most probable token each time. Default: the model's own, else 1.")
    ] = None,
    chat_template: Annotated[Path | None, field_option(ServerConfig, "chat_template")] = None,
    lora: Annotated[str | None, typer.Option(help="NAME=PATH of a LoRA adapter that answers.")] = None,
    markdown: Annotated[bool, typer.Option(help="Render the markdown of answers, where the terminal can.")] = True,
    **options: Any,
) -> None:
    """Talk to a model in the terminal. Ctrl-C stops an answer; /help lists the commands."""
    options["model"] = taken_model(context, model_name, options["model"])
    asked: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = {name: value for name, value in asked.items() if value is not None}
    text = _message(message)
    if url is None:
        partner = _own_model(options, chat_template, sampling, lora)
    else:
        partner = _served_model(context, url, api_key, options, sampling)
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
    from quire import LLM, SamplingParams
    from quire.terminal.partner import OwnModel

    SamplingParams(**sampling)  # check the options before the model is loaded
    loras = parse_loras([] if lora is None else [lora])
    llm = LLM(lora=loras, **ONE, **options)
    return OwnModel(llm, template, sampling, next(iter(loras), None))


def _served_model(
    context: typer.Context, url: str, key: str | None, options: dict[str, Any], sampling: dict[str, Any]
) -> Partner:
    from quire.terminal.client import Client
    from quire.terminal.partner import ServedModel

    for name in (*options, "chat_template", "lora"):
        if name != "model" and source_of(context, name) == "COMMANDLINE":
            fail(f"--{name.replace('_', '-')} is for a model that is loaded here; the one at {url} has its own")
    own = context.params["model_name"] is None and source_of(context, "model") == "ENVIRONMENT"  # of this machine
    return ServedModel(Client(url, key), None if own else options["model"], sampling)
