"""AsyncLLM: the same answers as LLM, in one batch, taken back when no one waits, for one event loop after another."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import EngineStopped, QuireError, RequestError
from quire.frontend.jobs import EngineStep

PROMPTS = ["def fibonacci(", "import os\n", "class A:\n"]
PARAMS = SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=12, logprobs=1, prompt_logprobs=0)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def served() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(dtype="float32", num_blocks=256)
    yield llm
    asyncio.run(llm.close())


async def outputs_of(stream: Any) -> list[Any]:
    return [output async for output in stream]


def test_answers_are_those_of_llm_and_grow(served: AsyncLLM) -> None:
    async def ask() -> Any:
        streams = [outputs_of(served.generate(prompt, PARAMS)) for prompt in PROMPTS]
        return await asyncio.gather(*streams), await served.embed("x = 1", dimensions=8)

    found, embedded = asyncio.run(ask())
    with LLM(dtype="float32", num_blocks=256) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert embedded.outputs == llm.embed("x = 1", dimensions=8, use_tqdm=False)[0].outputs
    for outputs, right in zip(found, expected, strict=True):
        assert outputs[-1].finished
        assert outputs[-1].outputs == right.outputs
        assert outputs[-1].prompt_logprobs == right.prompt_logprobs
        lengths = [sum(len(sample.token_ids) for sample in output.outputs) for output in outputs]
        assert lengths == sorted(set(lengths))
        assert not any(output.finished for output in outputs[:-1])


@pytest.mark.slow
def test_a_chat_is_that_of_llm(served: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "a queue"}]
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=7)
    template = "{{ tools | tojson }}{% for m in messages %}# {{ m.content }}\n{% endfor %}"

    async def ask() -> Any:
        own = {"tools": tools, "chat_template": template}
        found = await asyncio.gather(
            outputs_of(served.chat(messages, params)), outputs_of(served.chat(messages, params, **own))
        )
        with pytest.raises(RequestError, match="role"):
            await outputs_of(served.chat([{"content": "a"}], params))
        return [outputs[-1] for outputs in found]

    plain, shown = asyncio.run(ask())
    with LLM(dtype="float32", num_blocks=256) as llm:
        for output, rendering in ((plain, {}), (shown, {"tools": tools, "chat_template": template})):
            [right] = llm.chat(messages, params, use_tqdm=False, **rendering)
            assert (output.prompt, output.outputs) == (right.prompt, right.outputs)
    assert "clock" in shown.prompt


def test_what_no_one_waits_for_is_taken_back(served: AsyncLLM) -> None:
    async def ask() -> None:
        stream = served.generate("a", LONG, "mine")
        await anext(stream)
        with pytest.raises(RequestError, match="request_id is 'mine'"):
            await anext(served.generate("b", LONG, "mine"))
        await stream.aclose()
        task = asyncio.create_task(outputs_of(served.generate("b", LONG)))
        while not await served.call(lambda: served.engine.has_work):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while served._open:
            await asyncio.sleep(0)
        assert not await served.call(lambda: served.engine.has_work)
        with pytest.raises(RequestError, match="priority"):
            await anext(served.generate("a", priority="soon"))  # type: ignore[arg-type]

    asyncio.run(ask())  # another event loop than the first test's
    assert not served._names


def test_a_slow_reader_finds_all_in_one(served: AsyncLLM) -> None:
    async def ask() -> list[Any]:
        stream = served.generate("def a(", SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
        first = await anext(stream)
        held = list(first.outputs[0].token_ids)
        while served._open:
            await asyncio.sleep(0)
        assert first.outputs[0].token_ids == held  # what the reader has does not change
        return await outputs_of(stream)

    [rest] = asyncio.run(ask())
    assert (len(rest.outputs[0].token_ids), rest.finished) == (20, True)


def test_a_name_is_free_when_its_answer_ends(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine still holds the request of an answer that ended at a stop string when the name is used again."""
    params = [SamplingParams(max_tokens=12, stop=["e", "i"], temperature=1.0, seed=seed, n=2) for seed in (1, 2)]
    queued, post = threading.Semaphore(0), served.post
    held: list[bool] = []

    def watched_post(function: Any) -> None:
        post(function)
        queued.release()

    def wait_for_the_next(step: EngineStep) -> None:
        """Let no step come between the end of an answer and the job that is queued after it."""
        ended = [output.request_id for _, output in step.texts if output.finished]
        if "mine" in ended and not held:
            held.append("mine-0" in served.engine.scheduler.requests or "mine-1" in served.engine.scheduler.requests)
            queued.acquire()  # the first job
            queued.acquire()

    async def ask(names: list[str]) -> list[Any]:
        found = []
        for name, own in zip(names, params, strict=True):
            found.append((await outputs_of(served.generate("import os\n", own, name)))[-1])
        return found

    right = asyncio.run(ask(["one", "two"]))
    monkeypatch.setattr(served, "post", watched_post)
    monkeypatch.setattr(served, "observers", [wait_for_the_next])
    found = asyncio.run(ask(["mine", "mine"]))
    assert held == [True]
    assert [output.outputs for output in found] == [output.outputs for output in right]


def test_a_name_is_free_when_its_loop_is_closed(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a prompt that was still being made there, whose end then frees no other prompt's."""
    begun, released, request = threading.Event(), threading.Event(), served.llm.factory.one_generation

    def slow(*given: Any) -> Any:
        begun.set()
        released.wait()
        return request(*given)

    loop = asyncio.new_event_loop()
    stream = served.generate("a", LONG, "mine")
    with monkeypatch.context() as patch:
        patch.setattr(served.llm.factory, "one_generation", slow)
        task = loop.create_task(anext(stream))
        loop.run_until_complete(asyncio.to_thread(begun.wait))

        async def other() -> None:
            with pytest.raises(QuireError, match="another event loop waits"):
                await anext(served.generate("b"))

        asyncio.run(other())
        loop.close()
        released.set()

    async def ask() -> None:
        again = served.generate("a", LONG, "mine")
        await anext(again)
        with pytest.raises(RuntimeError):
            task.get_coro().throw(RuntimeError)
        with pytest.raises(RequestError, match="request_id is 'mine'"):
            await anext(served.generate("b", LONG, "mine"))
        await again.aclose()

    asyncio.run(ask())


@pytest.mark.slow
def test_closing_ends_what_waits() -> None:
    async def ask() -> None:
        async with AsyncLLM(num_blocks=64) as llm:
            stream = llm.generate("a", LONG)
            await anext(stream)
        with pytest.raises(EngineStopped, match="closed"):
            await outputs_of(stream)
        with pytest.raises(EngineStopped, match="closed"):
            await anext(llm.generate("a"))

    asyncio.run(ask())
