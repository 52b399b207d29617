"""A chat, with models of all kinds behind it."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli import app
from quire.errors import ConfigError, QuireError
from quire.terminal.chat import Chat, Ended
from quire.terminal.client import Client, Refused
from quire.terminal.partner import Message, OwnModel, Piece, ServedModel, TooLong, Usage
from tests.models.image_checkpoints import pictures, save_images_model
from tests.server.serving import Serving, serving
from tests.terminal.fake_server import DONE, USAGE, chunk, fake_server


class Echo:
    """Says what it was told, in pieces; takes a number of messages at most."""

    name, chosen, writes_code, has_template = "echo", "", False, True

    def __init__(self, most: int = 100, interrupted_at: int | None = None) -> None:
        self.usage: Usage | None = None
        self.heard: list[list[Message]] = []
        self.is_stopped = False
        self._most, self._interrupted_at = most, interrupted_at

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        if len(messages) > self._most:
            raise TooLong(f"{len(messages)} messages are too many")
        self.heard.append(list(messages))
        self.usage = Usage(0.0, 0.5, 1.5, prompt_tokens=9, cached_tokens=4, new_tokens=11)
        yield Piece("hm", is_thought=True)
        for i, word in enumerate(messages[-1]["content"].split()):
            if i == self._interrupted_at:
                signal.raise_signal(signal.SIGINT)
            if self.is_stopped:
                return
            yield Piece(f"{word} ")

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None:
        pass


class Seer(Echo):
    """Says that it has seen something."""

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        self.heard.append(list(messages))
        yield Piece("seen")


def chat_with(partner: Any, **options: Any) -> tuple[Chat, io.StringIO]:
    """A chat, and what it notes."""
    notes = io.StringIO()
    return Chat(partner, Console(file=io.StringIO()), Console(file=notes, width=200), markdown=True, **options), notes


def test_a_conversation_has_a_history_and_a_system_message(capsys: pytest.CaptureFixture[str]) -> None:
    partner = Echo()
    chat, notes = chat_with(partner)
    for text in ("one two", "/system be brief", "three", "/system", "/clear", "four", "  ", "/stats", "/help"):
        chat.take(text)
    system = {"role": "system", "content": "be brief"}
    first = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "one two "}]
    assert partner.heard[0] == first[:1]
    assert partner.heard[1] == [system, *first, {"role": "user", "content": "three"}]
    assert partner.heard[2] == [system, {"role": "user", "content": "four"}]
    assert capsys.readouterr().out == "one two \nthree \nfour \n"  # no reasoning, as nobody looks
    said = notes.getvalue()
    assert "be brief\n" in said
    assert "9 prompt tokens (4 from the prefix cache); the first new token after 0.50 s; 11 new tokens, 10.0 a" in said
    assert "33 new tokens; the conversation has 2 messages" in said
    for command in Chat.COMMANDS:
        assert f"\n{command}" in said
    for text in ("/exit", "/bye", "/quit"):
        with pytest.raises(Ended):
            chat.take(text)


def test_images_go_with_the_next_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a picture.png", tmp_path / "b.jpeg"
    first.write_bytes(b"png")
    second.write_bytes(b"jpeg")
    partner = Seer()
    chat, notes = chat_with(partner)
    chat.take(f"/image '{first}'")
    chat.take(f"/image {second}")
    with pytest.raises(QuireError, match=r"cannot be read: .*No such file"):
        chat.take(f"/image {second} ~/no/such/file.png")
    with pytest.raises(QuireError, match="is no path: No closing quotation"):
        chat.take("/image 'a")
    with pytest.raises(QuireError, match="is no regular file"):
        chat.take(f"/image {tmp_path}")
    chat.take("what is it")
    chat.take("and why")
    urls = [one["image_url"]["url"] for one in partner.heard[0][0]["content"][:2]]
    assert urls == ["data:image/png;base64,cG5n", "data:image/jpeg;base64,anBlZw=="]
    assert partner.heard[0][0]["content"][2] == {"type": "text", "text": "what is it"}
    assert partner.heard[1][0] == partner.heard[0][0]
    assert partner.heard[1][2]["content"] == "and why"
    chat.take(f"/image {second} {second}")
    chat.take("/image")
    chat.take("none")
    assert partner.heard[2][-1]["content"] == "none"
    assert notes.getvalue().split("\n")[:4] == [
        f"The next message has {count}." for count in ("1 image", "2 images", "2 images", "no images")
    ]
    chat.take(f"/image {first}")
    chat.partner = Echo(most=0)
    with pytest.raises(TooLong):
        chat.take("again")
    assert (chat.messages, chat.images) == ([], [])


def test_a_command_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    chat, _ = chat_with(Echo())
    with pytest.raises(QuireError, match=r"no command /stat; did you mean /stats\?"):
        chat.take("/stat")
    with pytest.raises(QuireError, match="no command /etc/hosts; /help lists all"):
        chat.take("/etc/hosts is a file")
    chat.take("/etc/hosts\nis a file")
    assert capsys.readouterr().out == "/etc/hosts is a file \n"


def test_what_no_longer_fits_is_left_out_with_a_word() -> None:
    partner = Echo(most=4)
    chat, notes = chat_with(partner, system="s")
    for text in ("one", "two", "three"):
        chat.take(text)
    assert [message["content"] for message in partner.heard[-1]] == ["s", "two", "two ", "three"]
    assert "(6 messages are too many; its oldest message and answer are left out)" in notes.getvalue()
    chat, _ = chat_with(Echo(most=0))
    with pytest.raises(TooLong):
        chat.take("one")
    assert chat.messages == []


def test_an_interrupt_stops_the_answer_which_stays(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    chat, notes = chat_with(Echo(interrupted_at=2))
    chat.take("one two three four")
    assert chat.messages[-1] == {"role": "assistant", "content": "one two "}
    assert notes.getvalue() == "(stopped)\n"
    assert signal.getsignal(signal.SIGINT) is before


# ------------------------------------------------------------------------------------------ an engine of its own


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=1, max_num_batched_tokens=64) as made:
        yield made


@pytest.mark.slow
def test_own_model_answers_as_llm_chat_does_and_reuses_the_conversation(llm: LLM) -> None:
    partner = OwnModel(llm, None, {"temperature": 0.0, "max_tokens": 40})
    messages = [{"role": "user", "content": "a stack\nwith two methods"}]
    said = "".join(piece.text for piece in partner.answer(messages))
    params = replace(llm.get_default_sampling_params(), temperature=0.0, max_tokens=40)
    [expected] = llm.chat(messages, params, use_tqdm=False)
    assert said == expected.outputs[0].text
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
    assert list(partner.answer(messages))
    assert partner.usage is not None
    assert partner.usage.cached_tokens > 0
    assert partner.usage.new_tokens == 40
    assert partner.usage.finish_reason == "length"
    assert partner.chosen.startswith(llm.backend.name)
    with pytest.raises(TooLong, match="this model takes 1,024 with its answer"):
        next(partner.answer([{"role": "user", "content": "import os\n" * 1024}]))
    partner.stop()
    assert not llm.engine.has_work


@pytest.mark.slow
def test_own_model_reads_images_as_llm_chat_does(tmp_path: Path) -> None:
    save_images_model(tmp_path, "smolvlm")
    path = tmp_path / "image.png"
    pictures(1)[0].save(path)
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, num_blocks=64) as llm:
        partner = OwnModel(llm, None, {"temperature": 0.0, "max_tokens": 4})
        chat, _ = chat_with(partner)
        chat.take(f"/image {path}")
        chat.take("what is it")
        params = SamplingParams(temperature=0.0, max_tokens=4)
        [output] = llm.chat(chat.messages[:1], params, use_tqdm=False)
        assert chat.messages[1]["content"] == output.outputs[0].text
        assert partner.usage is not None
        assert partner.usage.prompt_tokens == len(output.prompt_token_ids)
        text = {"type": "text", "text": "a" * 480}
        chat.messages = [{"role": "user", "content": [text]}, {"role": "assistant", "content": ""}]
        chat.take(f"/image {path}")
        chat.take("what is it")  # without the messages before it, which do not fit
        assert chat.messages[1]["content"] == output.outputs[0].text


@pytest.mark.slow
def test_own_model_is_stopped_between_two_steps(llm: LLM) -> None:
    partner = OwnModel(llm, None, {"max_tokens": None})
    answer = partner.answer([{"role": "user", "content": "a stack"}])
    assert next(answer).text
    partner.stop()
    assert not list(answer)
    assert not llm.engine.has_work


@pytest.mark.slow
def test_reasoning_is_shown_apart_from_the_answer(llm: LLM, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}{% if add_generation_prompt %}<think>{% endif %}{# </think> #}")
    partner = OwnModel(llm, template, {"max_tokens": 5})
    pieces = list(partner.answer([{"role": "user", "content": "import os\n"}]))
    assert pieces
    assert all(piece.is_thought for piece in pieces)


@pytest.mark.slow
def test_a_model_without_a_template_continues_texts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llm.text_files), "template", lambda self: None)
    partner = OwnModel(llm, None, {"temperature": 0.0, "max_tokens": 8})
    assert not partner.has_template
    messages = [{"role": "user", "content": text} for text in ("def main(", "import ")]
    [expected] = llm.generate("import ", partner._sampling, use_tqdm=False)
    assert "".join(piece.text for piece in partner.answer(messages)) == expected.outputs[0].text


# ----------------------------------------------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(api_key=("a key",)) as running:
        yield running


@pytest.mark.slow
def test_a_servers_model_answers(server: Serving) -> None:
    partner = ServedModel(Client(f"{server.url}/v1/", "a key"), None, {"temperature": 0.0, "max_tokens": 40})
    assert (partner.name, partner.writes_code) == ("quire-embedded", True)
    messages = [{"role": "user", "content": "a stack"}]
    said = "".join(piece.text for piece in partner.answer(messages))
    body = {"model": "quire-embedded", "messages": messages, "temperature": 0.0, "max_tokens": 40}
    answer = server.ask("POST", "/v1/chat/completions", body, {"Authorization": "Bearer a key"}).json()
    assert said == answer["choices"][0]["message"]["content"]
    assert partner.usage is not None
    assert (partner.usage.new_tokens, partner.usage.finish_reason) == (40, "length")
    with pytest.raises(TooLong):
        list(partner.answer([{"role": "user", "content": "import os\n" * 1024}]))
    with pytest.raises(QuireError, match="has no model 'other'; it has quire-embedded"):
        ServedModel(Client(server.url, "a key"), "other", {})
    for key in (None, "another key"):
        with pytest.raises(Refused, match="wants a key: give --api-key KEY, or set QUIRE_API_KEY"):
            ServedModel(Client(server.url, key), None, {})


@pytest.mark.slow
def test_to_stop_is_to_hang_up(server: Serving) -> None:
    partner = ServedModel(Client(server.url, "a key"), None, {"max_tokens": 900, "ignore_eos": True})
    answer = partner.answer([{"role": "user", "content": "a stack"}])
    assert next(answer).text
    partner.stop()
    list(answer)
    while not server.is_idle():
        pass


def test_reasoning_and_usage_of_a_server_are_read() -> None:
    with fake_server([chunk(thought="hm"), chunk("yes"), chunk(" no", reason="stop"), USAGE, DONE]) as url:
        partner = ServedModel(Client(url), None, {})
        pieces = list(partner.answer([{"role": "user", "content": "?"}]))
    assert pieces == [Piece("hm", is_thought=True), Piece("yes"), Piece(" no")]
    assert partner.usage is not None
    assert (partner.usage.prompt_tokens, partner.usage.cached_tokens, partner.usage.new_tokens) == (7, 4, 2)


def test_the_variable_of_the_model_is_for_one_that_is_loaded_here(caplog: pytest.LogCaptureFixture) -> None:
    with fake_server([chunk("yes", reason="stop"), USAGE, DONE]) as url:
        arguments, environment = ["chat", "--url", url], {"QUIRE_MODEL": "another", "QUIRE_DTIPE": "float32"}
        shown = CliRunner().invoke(app, arguments, input="well?", env=environment)
        assert (shown.exit_code, shown.stdout.strip()) == (0, "yes"), shown.output
        assert "QUIRE_DTIPE, which is not the variable of an option; did you mean QUIRE_DTYPE?" in caplog.text
        refused = CliRunner().invoke(app, [*arguments, "--model", "another"], input="well?")
        assert "has no model 'another'; it has fake" in refused.stderr


@pytest.mark.parametrize(
    ("parts", "status", "words"),
    [
        ([chunk("yes")], 200, "ended in the middle of an answer"),
        ([chunk("yes"), b"data: {"], 200, "ended in the middle of an answer|an event that is no JSON"),
        ([], 200, "ended in the middle of an answer"),
        ([b"data: [1]\n\n"], 200, "an event that is no object"),
        ([b'data: {"error": {"message": "too hot"}}\n\n'], 200, "the server reports: too hot"),
        ([b"<html>no</html>"], 502, "answers /v1/chat/completions with HTTP status 502: Bad Gateway"),
        ([b'{"error": {"message": "no template"}}'], 400, "HTTP status 400: no template"),
    ],
)
def test_a_server_that_fails_is_a_sentence(parts: list[bytes], status: int, words: str) -> None:
    with fake_server(parts, status) as url:
        partner = ServedModel(Client(url), None, {})
        with pytest.raises(QuireError, match=words):
            list(partner.answer([{"role": "user", "content": "?"}]))


@pytest.mark.slow
def test_what_is_no_server_is_a_sentence() -> None:
    for listed, words in (
        (b"<html>", "does not answer JSON"),
        (b"{}", "lists no models"),
        (b'{"data":[]}', "no model"),
    ):
        with fake_server([], models=listed) as url, pytest.raises(QuireError, match=words):
            ServedModel(Client(url), None, {})
    with pytest.raises(QuireError, match=r"no server answers at http://127.0.0.1:9 \(Connection refused\)"):
        ServedModel(Client("http://127.0.0.1:9"), None, {})
    for url in ("ftp://x", "http://", "http://x:y", "http://x:99999"):
        with pytest.raises(ConfigError, match="url is"):
            Client(url)
    with pytest.raises(ConfigError, match="characters that no HTTP header can carry"):
        Client("http://x", "schlüssel\n")


@pytest.mark.parametrize(
    ("arguments", "stdin", "sent"),
    [
        (["def f(x):"], None, "def f(x):"),
        (["fake", "def f(x):"], None, "def f(x):"),
        (["def f(x):", "--model", "fake"], None, "def f(x):"),
        (["fake"], "piped", "piped"),
        (["-"], "piped", "piped"),
        ([], "piped", "piped"),
    ],
)
def test_with_a_url_a_single_argument_is_the_message(arguments: list[str], stdin: str | None, sent: str) -> None:
    """Unless the server has a model of that name. Sampling options are sent as well."""
    heard: list[Any] = []
    with fake_server([chunk("yes"), DONE], heard=heard) as url:
        options = ["--top-p", "0.5", "--stop", "x", "--stop", "y", "--seed", "4"]
        shown = CliRunner().invoke(app, ["chat", *arguments, "--url", url, *options], input=stdin)
    assert (shown.exit_code, shown.stdout) == (0, "yes\n"), shown.output
    [body] = heard
    assert (body["model"], body["messages"]) == ("fake", [{"role": "user", "content": sent}])
    assert (body["top_p"], body["stop"], body["seed"]) == (0.5, ["x", "y"], 4)
    assert body.keys() == {"model", "messages", "stream", "stream_options", "top_p", "stop", "seed"}
