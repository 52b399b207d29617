"""A server that guesses: what it answers, streams, counts and shows is what one that does not would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.speculation import PromptLookup, Speculation
from tests.engine.fakes import CIRCLE, circling, fake_engine, request, siblings
from tests.server.serving import Serving, serving
from tests.server.test_metrics import Samples
from tests.server.watching import Hub

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOOPING = "class Stack:\n"  # after which the embedded model soon repeats itself
USAGE = {"include_usage": True, "continuous_usage_stats": True}
Chunk = dict[str, Any]


@pytest.fixture(scope="module")
def plain() -> Iterator[Serving]:
    with serving({"num_speculative_tokens": 0}) as running:
        yield running


@pytest.fixture(scope="module")
def guessing() -> Iterator[Serving]:
    with serving({"num_speculative_tokens": 5}) as running:
        yield running


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"logprobs": 2}),
    "drawn": (COMPLETIONS, {"logprobs": 0, "temperature": 0.4, "seed": 3, "n": 2}),
    "echo": (COMPLETIONS, {"logprobs": 1, "echo": True}),
    "several prompts": (COMPLETIONS, {"prompt": [LOOPING, "x = "], "logprobs": 1}),
    "stop string": (COMPLETIONS, {"logprobs": 1, "stop": ["01-2001-20"]}),
    "kept stop string": (COMPLETIONS, {"logprobs": 1, "stop": "01-2001-20", "include_stop_str_in_output": True}),
    "chat": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "chat with a stop string": (CHAT, {"logprobs": True, "stop": "e"}),
    "not told": (COMPLETIONS, {}),
}


def asked(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "a a a a"}]} if path == CHAT else {"prompt": LOOPING}
    return prompt | {"max_tokens": 60, "temperature": 0, "ignore_eos": True} | fields


def joined(chunks: list[Chunk]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, as the whole answer has them."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = found.setdefault(choice["index"], {"text": "", "logprobs": {}, "finish_reason": None})
        one["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for name, entries in (choice["logprobs"] or {}).items():
            one["logprobs"][name] = one["logprobs"].get(name, []) + (entries or [])
        one |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice.get(name) is not None}
    return found


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.long] * (name in ("echo", "not told", "several prompts")))
        for name, case in CASES.items()
    ],
)
def test_streams_are_those_of_a_server_that_does_not_guess(
    plain: Serving, guessing: Serving, path: str, fields: dict[str, Any]
) -> None:
    """Text, logprobs and usage, the last bit of each; and whole answers too."""
    streams = []
    for here in (plain, guessing):
        here.on_engine(here.service.engine_client.engine.reset_prefix_cache)
        streams.append(here.post(path, **asked(path, fields), stream=True, stream_options=USAGE).events())
    slow, guessed = streams
    assert joined(guessed) == joined(slow)
    assert guessed[-1]["usage"] == slow[-1]["usage"]
    assert guessed[-1]["choices"] == []
    for here in (plain, guessing):
        here.on_engine(here.service.engine_client.engine.reset_prefix_cache)
    wholes = [here.post(path, **asked(path, fields)).json() for here in (plain, guessing)]
    assert wholes[0]["choices"] == wholes[1]["choices"]
    assert wholes[0]["usage"] == wholes[1]["usage"] == guessed[-1]["usage"]
    if path == COMPLETIONS and "stop" not in fields:
        assert len(guessed) < len(slow), "nothing was guessed"


def test_usage_so_far_counts_every_token_of_a_chunk(guessing: Serving) -> None:
    fields = asked(COMPLETIONS, {"logprobs": 0})
    *chunks, end = guessing.post(COMPLETIONS, **fields, stream=True, stream_options=USAGE).events()
    so_far = 0
    sizes = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        sizes.append(len(choice["logprobs"]["tokens"]))
        so_far += sizes[-1]
        assert chunk["usage"]["completion_tokens"] == so_far
    assert so_far == end["usage"]["completion_tokens"] == 60
    assert max(sizes) > 1, "nothing was guessed"


def test_what_came_after_a_stop_string_is_not_counted() -> None:
    with serving({"num_speculative_tokens": 7}) as server:
        shown = []
        for stop in ("0" * length for length in range(12, 30)):  # now and then within the tokens of a step
            answer = server.post(COMPLETIONS, prompt="x = ", temperature=0, max_tokens=60, stop=stop).json()
            assert answer["choices"][0]["stop_reason"] == stop
            shown.append(answer["usage"]["completion_tokens"])
        assert shown == sorted(shown)
        server.on_engine(lambda: None)  # the last step is counted now
        found = Samples(server.metrics)
        for name in ("request_generation_tokens_sum", "request_max_num_generation_tokens_sum",
                     "generation_tokens_total"):  # fmt: skip
            assert found(f"quire:{name}", model_name="quire-embedded") == sum(shown)
        assert found("quire:request_success_total", finished_reason="stop", model_name="quire-embedded") == len(shown)
        arrivals = found("quire:inter_token_latency_seconds_count", model_name="quire-embedded") + len(shown)
        assert arrivals < sum(shown) / 2, "hardly anything was guessed"
        for name, own in (("draft", ""), ("accepted", "_accepted")):
            by_source = found(f"quire:draft_tokens{own}_total", source="lookup", model_name="quire-embedded")
            total = found(f"quire:spec_decode_num_{name}_tokens_total", model_name="quire-embedded")
            assert by_source == total > 100
        assert server.is_idle()


def test_the_inspector_shows_a_run_with_guesses() -> None:
    """The books of a watcher stay right, and every token is counted, where a step brings a request several."""
    engine = fake_engine(
        num_blocks=24, num_host_blocks=12, model=circling, speculation=Speculation([PromptLookup()], 5)
    )
    hub = Hub(engine)
    books, _ = hub.watch()
    for i in range(6):
        prompt = [(i + k) % CIRCLE for k in range(13 + i)]
        for r in siblings(f"s{i}", prompt, 2, max_tokens=25) if i % 3 == 0 else [request(f"r{i}", prompt)]:
            engine.add(r)
    most = 0
    while engine.has_work:
        before = len(hub.events)
        hub.step()
        hub.inspector.flush()
        books.check(engine)
        names = [event.request_id for event in hub.events[before:]]
        most = max(most, *map(names.count, names), 0)
    assert most > 2, "hardly anything was guessed"
    assert books.gauges["generated_tokens"] == sum(event.token is not None for event in hub.events)
    assert engine.scheduler.num_preemptions > 0
    totals = {name: books.gauges[f"{name}_tokens"] for name in ("drafted", "accepted")}
    assert totals["drafted"] > totals["accepted"] > 5
    assert totals == books.drafts, "the requests' numbers add up"
    for story in books.stories.values():
        assert [what for what in story if what in ("ran", "first_token", "ended")] == ["ran", "first_token", "ended"]
