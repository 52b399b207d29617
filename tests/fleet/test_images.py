"""Images through a gateway: replicas read them, requests go to their blocks, and move with their images."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire.fleet.wire import WireError, read_encoded
from quire.frontend.model_fingerprint import replica_fingerprint
from tests.fleet.gateways import at, fronting, lose, slow_all, slowed, until, value
from tests.fleet.serving import SECRET, Front
from tests.models.image_checkpoints import pictures, save_images_model
from tests.server.serving import Serving, serving

CHAT = "/v1/chat/completions"


def url_of(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


ONE, TWO = (url_of(image) for image in pictures(2))


def asked(text: str, *urls: str, **own: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "seed": 3, "ignore_eos": True} | own


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    directory: Path = tmp_path_factory.mktemp("smolvlm")
    save_images_model(directory, "smolvlm")
    options = {"model": str(directory), "dtype": "float32", "max_model_len": 512, "async_scheduling": False}
    with ExitStack() as stack:
        yield [stack.enter_context(serving(options, slowed, fleet_secret=SECRET)) for _ in range(2)]


@pytest.fixture
def front(two: list[Serving]) -> Iterator[Front]:
    with fronting(*(server.url for server in two)) as found:
        yield found
    slow_all(two, 0.0)


def test_a_gateway_answers_as_a_server_does_and_finds_the_blocks(front: Front, two: list[Serving]) -> None:
    for body in (asked("What is it?", ONE), asked("And these?", TWO, ONE, n=2, logprobs=True), asked("No image")):
        expected, found = two[0].ask("POST", CHAT, body), front.ask("POST", CHAT, body)
        assert found.status == 200, found.body
        assert [choice["message"] for choice in found.json()["choices"]] == [
            choice["message"] for choice in expected.json()["choices"]
        ]
        assert found.json()["usage"]["prompt_tokens"] == expected.json()["usage"]["prompt_tokens"]
    start = "It is a picture. " * 12
    [other] = pictures(1, seed=9)
    for end in "abcdefgh":  # a replica may answer too late that it has the blocks
        body = asked(end, url_of(other))
        body["messages"][0]["content"].insert(0, {"type": "text", "text": start})
        usage = front.ask("POST", CHAT, body).json()["usage"]
        best = front.gateway.fleet.placements[-1].choice.best  # type: ignore[union-attr]
        if usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * usage["prompt_tokens"]:
            break
    assert end != "h", usage
    assert best.uncached_tokens <= 16, "the gateway knew of the blocks with the image's rows"


def test_an_answer_goes_on_where_its_replica_is_lost(front: Front, two: list[Serving]) -> None:
    body = asked("What is it?", TWO, max_tokens=24)
    expected = two[0].ask("POST", CHAT, body).json()["choices"][0]["message"]["content"]
    slow_all(two, 0.02)
    before = sum(value(server, "quire:resumed_requests_total") for server in two)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(front.ask("POST", CHAT, body)))
    thread.start()
    fleet = front.gateway.fleet  # type: ignore[union-attr]
    placements = fleet.placements
    until(lambda: any(work.ledgers[0].tokens for job in list(fleet.jobs) for work in fleet.jobs.of(job)))
    lose(at(two, placements[-1].choice.best.candidate.name))
    thread.join(60)
    assert found[0].json()["choices"][0]["message"]["content"] == expected
    assert sum(value(server, "quire:resumed_requests_total") for server in two) == before + 1
    assert len({one.choice.best.candidate.name for one in placements}) == 2


def test_the_fingerprint_covers_the_processor_of_images(two: list[Serving]) -> None:
    llm = two[0].service.engine_client.llm.llm
    before = replica_fingerprint(llm, None)
    path = llm.files.path / "preprocessor_config.json"
    text = path.read_text()
    path.write_text(text.replace("0.5", "0.25"))
    after = replica_fingerprint(llm, None)
    path.write_text(text)
    assert before.difference(after) == ("images",)


def test_images_are_not_read_to_look_up_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of a model with recurrent states are asked for the blocks that they have."""
    save_images_model(tmp_path, "qwen3_5")
    options = {"model": str(tmp_path), "dtype": "float32", "max_model_len": 512}
    with serving(options, fleet_secret=SECRET) as server, fronting(server.url) as front:
        read: list[str] = []
        factory = server.service.factory
        tokenize = factory.with_images
        monkeypatch.setattr(factory, "with_images", lambda text, urls: [read.append(text), tokenize(text, urls)][1])
        body = asked("a", ONE)
        body["messages"][0]["content"].insert(0, {"type": "text", "text": "It is a picture. " * 12})
        expected = front.ask("POST", CHAT, body).json()["choices"][0]["message"]
        found = front.ask("POST", CHAT, body).json()
        assert found["choices"][0]["message"] == expected
        best = front.gateway.fleet.placements[-1].choice.best  # type: ignore[union-attr]
        assert best.uncached_tokens <= 32
        assert len(read) == 4, "each request: for the gateway, and to compute it"


@pytest.mark.parametrize("url", ["data:image/png;base64,YWJj", "http://127.0.0.1/a.png", "/etc/passwd", ONE])
def test_what_is_no_prompt_is_refused_as_by_a_server(front: Front, two: list[Serving], url: str) -> None:
    body = asked("What?" * 400, url)
    found, expected = front.ask("POST", CHAT, body), two[0].ask("POST", CHAT, body)
    assert (found.status, found.error()) == (400, expected.error())


def test_a_fleet_of_a_text_model_refuses_images() -> None:
    with serving({"num_blocks": 64}, fleet_secret=SECRET) as text, fronting(text.url) as front:
        message = front.ask("POST", CHAT, asked("What?", ONE)).error()["message"]
        assert message == "messages[0].content[0] is an image, and this model is served for text alone"


@pytest.mark.parametrize(
    "change",
    [{"tokens": None}, {"tokens": [1, "a"]}, {"tokens": [-1]}, {"tokens": []},
     {"starts": []}, {"starts": [[2, "ab"]]}, {"starts": [[0]]},
     {"starts": [[1, "x"]]}, {"starts": [[1, "ab"], [1, "ab"]]}, {"placeholder": None}, {"starts": [[-1, "ab"]]}],
    ids=json.dumps,
)  # fmt: skip
def test_tokens_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    good = {"tokens": [5, 7, 6], "placeholder": 7, "starts": [[1, "ab"]]}
    assert read_encoded(good).starts == [(1, b"\xab")]
    with pytest.raises(WireError, match="a prompt with images is"):
        read_encoded(good | change)
