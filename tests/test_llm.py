"""LLM, the offline interface, on the embedded model and on tiny random ones."""

import gc
import weakref
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from quire import LLM, BeamSearchParams, SamplingParams
from quire.engine import runner
from quire.engine.engine import working_memory
from quire.errors import ConfigError, ModelError, QuireError, RequestError, Unsupported
from quire.request import StructuredOutputsParams
from tests.models.checkpoints import save

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_blocks=256)  # in bf16 two logits are often equal, and batches decide between them


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A checkpoint without a tokenizer."""
    directory = tmp_path_factory.mktemp("bare")
    save(directory)
    return LLM(str(directory), num_blocks=256)


@pytest.mark.slow
def test_the_forms_of_a_prompt_are_one(llm: LLM) -> None:
    text = "def fibonacci("
    tokens = llm.tokenizer.encode(text)
    first = llm.generate(text, GREEDY)
    assert len(first) == 1
    expected = first[0].outputs[0]
    assert len(expected.token_ids) == 12
    assert expected.finish_reason == "length"
    forms: list[Any] = [
        [text],
        tokens,
        [tokens],
        {"prompt_token_ids": tokens},
        [{"prompt_token_ids": tokens}],
        {"prompt": text},
    ]
    for form in forms:
        [output] = llm.generate(form, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].text == expected.text
        assert output.prompt_token_ids == tokens
    assert first[0].prompt == text
    assert llm.generate(tokens, GREEDY)[0].prompt is None


def test_results_are_in_input_order_whoever_ends_first(llm: LLM) -> None:
    prompts = ["import os\n", "class A:\n", "x = 1\n", "# comment\n"]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (20, 3, 11, 1)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 3, 11, 1]
    alone = [llm.generate(prompt, one)[0].outputs[0].text for prompt, one in zip(prompts, params, strict=True)]
    assert [output.outputs[0].text for output in outputs] == alone


def test_text_is_the_tokens_text(llm: LLM) -> None:
    for output in llm.generate(
        ["def f(x):\n    return", '"""'], SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    ):
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_seeds(llm: LLM) -> None:
    def texts(**sampling: Any) -> list[str]:
        return [o.outputs[0].text for o in llm.generate(["def a"] * 3, SamplingParams(max_tokens=16, **sampling))]

    given = texts(seed=7)
    assert given[0] == given[1] == given[2] == texts(seed=7)[0]
    assert len(set(texts())) == 3
    [output] = llm.generate("def a", SamplingParams(max_tokens=16))
    [again] = llm.generate("def a", SamplingParams(max_tokens=16, seed=output.outputs[0].seed))
    assert output.outputs[0].text == again.outputs[0].text


def test_n_samples_of_one_prompt(llm: LLM) -> None:
    [output] = llm.generate("class ", SamplingParams(n=4, max_tokens=12, seed=3, prompt_logprobs=0, logprobs=0))
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.finished
    [first] = llm.generate("class ", SamplingParams(max_tokens=12, seed=3))
    assert first.outputs[0].token_ids == output.outputs[0].token_ids
    [unseeded] = llm.generate("class ", SamplingParams(n=3, max_tokens=12))
    [again] = llm.generate("class ", SamplingParams(n=3, max_tokens=12, seed=unseeded.outputs[2].seed))
    assert [sample.token_ids for sample in again.outputs] == [sample.token_ids for sample in unseeded.outputs]


@pytest.mark.parametrize("budget", [3, 2048])
def test_logprobs_of_prompt_and_output(tmp_path: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a prompt comes in chunks, a request is preempted, and rows exceed what is computed at a time."""
    monkeypatch.setattr(runner, "MAX_LOGIT_ROWS", 5)
    theirs = save(tmp_path)
    llm = LLM(str(tmp_path), num_blocks=7, block_size=4, max_num_batched_tokens=budget)
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        sample = output.outputs[0]
        tokens = prompt + sample.token_ids
        expected = torch.log_softmax(theirs(torch.tensor([tokens])).logits[0], -1)
        reported = [*(output.prompt_logprobs or []), *(sample.logprobs or [])]
        assert reported[0] is None
        assert len(reported) == len(tokens) == len(prompt) + 12
        for n, position in enumerate(reported[1:], start=1):
            asked = 2 if n < len(prompt) else 3
            top = expected[n - 1].topk(asked).indices.tolist()
            assert set(position) == {tokens[n], *top}
            for token, found in position.items():
                assert found.logprob == pytest.approx(expected[n - 1, token].item(), abs=1e-3)
                assert found.rank == 1 + (expected[n - 1] > expected[n - 1, token]).sum()
                assert found.decoded_token is None
        total = sum(position[token].logprob for position, token in zip(sample.logprobs, sample.token_ids, strict=True))
        assert sample.cumulative_logprob == pytest.approx(total)


def test_logprobs_name_their_tokens(llm: LLM) -> None:
    [output] = llm.generate("import ", SamplingParams(temperature=0.0, max_tokens=3, logprobs=1))
    for token, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert position[token].rank == 1
        assert position[token].decoded_token == llm.tokenizer.decode([token])


def test_stop_strings_end_a_request_and_free_its_blocks(llm: LLM) -> None:
    [free] = llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    text = free.outputs[0].text
    stop = text[20:23]
    [output] = llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop]))
    sample = output.outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert sample.text == text[: text.find(stop)]
    assert len(sample.token_ids) < len(free.outputs[0].token_ids)
    assert llm.engine.scheduler.usage().used_blocks == 0


def test_streaming_grows_and_ends_as_generate_does(llm: LLM) -> None:
    prompts = ["def ", "class "]
    params = SamplingParams(max_tokens=15, seed=2, stop=["\n\n"])
    seen: dict[str, list[str]] = {}
    for output in llm.stream(prompts, params):
        seen.setdefault(output.request_id, []).append(output.outputs[0].text)
    for texts, whole in zip(seen.values(), llm.generate(prompts, params), strict=True):
        assert texts[-1] == whole.outputs[0].text
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_streams_side_by_side_lose_nothing(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 12)]
    expected = [llm.generate("def ", one)[0].outputs[0].text for one in params]
    streams = [llm.stream("def ", one) for one in params]
    last: list[str] = ["", ""]
    for outputs in zip_longest(*streams):  # one step of each in turn
        last = [text if output is None else output.outputs[0].text for text, output in zip(last, outputs, strict=True)]
    assert last == expected


def test_leaving_a_stream_takes_its_requests_back(llm: LLM) -> None:
    stream = llm.stream(["def "] * 3, SamplingParams(max_tokens=100))
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.scheduler.usage().used_blocks == 0


def test_a_failing_step_ends_its_prompts_and_the_engine_serves_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "logits", lambda hidden: 1 / 0)
        outputs = llm.generate(["a", "b"], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert outputs[0].outputs[0].error == "ZeroDivisionError: division by zero"
    assert llm.generate("a", GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_model_without_a_tokenizer_works_with_token_ids(bare: LLM) -> None:
    [output] = bare.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0.0, max_tokens=4, logprobs=1))
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="'hello' is a text, and this model has no tokenizer; give token ids"):
        bare.generate("hello")
    with pytest.raises(RequestError, match="without a tokenizer only stop_token_ids can end a request"):
        bare.generate([5], SamplingParams(stop="x"))


def test_hostile_parameters_do_not_hurt_the_neighbours(llm: LLM) -> None:
    extreme = SamplingParams(temperature=1e6, repetition_penalty=1e6, top_k=2**31 - 1, min_tokens=3, max_tokens=4)
    expected = llm.generate("import os\n", GREEDY)[0].outputs[0].token_ids
    outputs = llm.generate(["import os\n"] * 2, [extreme, GREEDY])
    assert outputs[1].outputs[0].token_ids == expected
    assert outputs[0].outputs[0].error is None
    assert all(0 <= token < llm.engine.vocab_size for token in outputs[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    ("prompts", "params", "match"),
    [
        ("", GREEDY, None),  # the tokenizer puts its start token before it
        ([[]], GREEDY, "empty prompt"),
        ({"prompt_token_ids": []}, GREEDY, "empty prompt"),
        ([1, 2048], GREEDY, r"prompt\[1\] is 2048; token ids of this model lie in 0\.\.2047"),
        ([1, -1], GREEDY, "prompt token 1 is -1"),
        ([[1, 2.5]], GREEDY, r"prompt token 1 is 2\.5"),
        ({"text": "a"}, GREEDY, r"has the keys \['text'\]; give either 'prompt' or 'prompt_token_ids'"),
        (5, GREEDY, "prompts is a int; give a text"),
        ([None], GREEDY, "a prompt is a NoneType"),
        ({"prompt_token_ids": None}, GREEDY, "a prompt is a NoneType"),
        (torch.tensor([1, 2]), GREEDY, "prompts is a Tensor"),
        (["a", "b"], [GREEDY], "2 prompts were given with 1 sampling_params"),
        ([[1] * 1024], GREEDY, "a prompt may have at most 1023"),
        (["a", [1] * 1024], GREEDY, "a prompt may have at most 1023"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompts: Any, params: Any, match: str | None) -> None:
    if match is None:
        assert len(llm.generate(prompts, params)) == 1
        return
    with pytest.raises(RequestError, match=match):
        llm.generate(prompts, params)
    assert not llm.engine.has_work


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_options_that_cannot_be_honoured() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(max_num_seq=3)
    with pytest.raises(Unsupported, match="no attention backend 'warp'; there are: auto, "):
        LLM(attention_backend="warp")
    with pytest.raises(Unsupported, match="device is 'tpu'; it must be cpu, or cuda"):
        LLM(device="tpu")
    with pytest.raises(ConfigError, match=r"the KV cache may take 0\.0 MiB .* needs 1\.2 MiB"):
        LLM(kv_cache_memory="10KiB")
    with pytest.raises(ModelError):
        LLM("no such model")
    assert issubclass(Unsupported, QuireError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which the next test uses")
def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(Unsupported, match="device is 'cuda'; this machine has no CUDA devices"):
        LLM(device="cuda")


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; the other tests run the same code on the CPU"
)
def test_a_gpu_gives_the_same_text(llm: LLM) -> None:
    [there], [here] = (
        LLM(device="cuda", dtype="float32").generate("def ", GREEDY),
        LLM(dtype="float32").generate("def ", GREEDY),
    )
    assert there.outputs[0].token_ids == here.outputs[0].token_ids


@pytest.mark.slow
def test_gathered_attention_gives_the_same_text(llm: LLM) -> None:
    prompts = ["import sys\n", "def f(", "class A:\n    def b(self"]
    gathered = LLM(dtype="float32", num_blocks=256, attention_backend="gather").generate(prompts, GREEDY)
    for ours, theirs in zip(llm.generate(prompts, GREEDY), gathered, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


@pytest.mark.slow
def test_gathering_has_its_own_span_in_a_profile() -> None:
    gathering = LLM(attention_backend="gather", num_blocks=64)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        gathering.generate("import sys\n", SamplingParams(max_tokens=2, ignore_eos=True))
    spans = [event.name for event in recorded.events()]
    assert spans.count("quire::gather") == 2 * gathering.engine.runner.model.config.num_layers


def test_params_of_the_other_kind_are_refused() -> None:
    llm = LLM(num_blocks=20)
    with pytest.raises(RequestError, match="params is a SamplingParams; it must be BeamSearchParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sampling_params is a BeamSearchParams; it must be SamplingParams"):
        llm.generate("a", BeamSearchParams(beam_width=2))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="ignore_eos is 'no'; it must be True or False"):
        BeamSearchParams(beam_width=2, ignore_eos="no")  # type: ignore[arg-type]


def test_errors_name_prompts_by_their_places(llm: LLM) -> None:
    """The caller does not know what requests are called."""
    long = [1] * 2_000
    for ask in (
        lambda prompts: llm.generate(prompts, SamplingParams(n=2), use_tqdm=False),
        lambda prompts: next(llm.stream(prompts)),
        lambda prompts: llm.embed(prompts, use_tqdm=False),
        lambda prompts: llm.beam_search(prompts, BeamSearchParams(beam_width=2)),
    ):
        for prompts, words in (
            ([[1], long], "the request of prompt 1 has a prompt"),
            ([long], "the request has a prompt"),
        ):
            with pytest.raises(RequestError, match=f"^{words} of 2000 tokens") as found:
                ask(prompts)
            assert found.value.field == "prompt"
    with pytest.raises(RequestError, match=r"^the request of prompt 2: prompt\[1\] is 99999"):
        llm.generate([[1], [2], [3, 99_999]], use_tqdm=False)


def test_a_priority_that_nobody_would_heed_is_refused() -> None:
    with pytest.raises(
        RequestError, match="the request of prompt 0 has priority 5; only scheduling_policy='priority' uses"
    ):
        LLM(num_blocks=20).generate(["a", "b"], SamplingParams(max_tokens=1), priority=[5, 0])
    LLM(num_blocks=20).generate(["a", "b"], SamplingParams(max_tokens=1), priority=[0, 0])
    LLM(num_blocks=20, scheduling_policy="priority").generate("a", SamplingParams(max_tokens=1), priority=[5])


def test_room_for_swapping_that_would_not_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="swap_space is '1GiB'; only preemption='swap' uses it, so give both"):
        LLM(swap_space="1GiB")


def test_the_host_pool_is_what_the_cache_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = LLM(num_blocks=16).decoder
    step = working_memory(decoder.config, decoder.dtype.itemsize, 2048)
    monkeypatch.setattr("quire.engine.engine.free_memory", lambda *_: step + 400 * 2**20)
    options = {"num_blocks": 5_000, "preemption": "swap"}  # 20 KiB each: 98 MiB
    assert LLM(**options, swap_space="300MiB").engine.scheduler.manager.host_pools[0].num_blocks > 0
    with pytest.raises(ConfigError, match=r"swap_space='310MiB' asks for .* are free"):
        LLM(**options, swap_space="310MiB", max_num_seqs=4096)


@pytest.mark.slow
def test_a_closed_llm_frees_its_memory_and_says_so() -> None:
    with LLM(num_blocks=64) as llm:
        stream = llm.stream("import os\n", SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        regex = StructuredOutputsParams(regex="a")
        [one] = llm.generate("import os\n", SamplingParams(structured_outputs=regex))
        assert one.outputs[0].text == "a"
        runner, manager = llm.engine.runner, llm.engine.scheduler.manager
        parts = [weakref.ref(part) for part in (llm.engine, llm.decoder, runner, runner.cache, manager)]  # type: ignore[attr-defined]
        del runner, manager
    with pytest.raises(QuireError, match="this LLM is closed"):
        next(stream)
    del stream
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.embed("a"),
        lambda: llm.loglikelihood("a", "\n"),
        lambda: llm.beam_search("a", BeamSearchParams(beam_width=2)),
        llm.reset_prefix_cache,
    ):
        with pytest.raises(QuireError, match="this LLM is closed"):
            call()
    llm.close()
    gc.collect()
    assert [part() for part in parts] == [None] * 5


def test_token_ids_are_given_as_vllm_s_callers_do() -> None:
    with LLM(num_blocks=64) as llm:
        params = SamplingParams(max_tokens=2, temperature=0)
        expected = llm.generate([[5, 6], [7]], params)
        for given in ([[5, 6], [7]], [5, 6]):
            found = llm.generate(prompt_token_ids=given, sampling_params=params)
            assert [one.outputs[0].token_ids for one in found] == [
                one.outputs[0].token_ids for one in expected[: len(found)]
            ]
        for given in ({}, {"prompts": "a", "prompt_token_ids": [5]}):
            with pytest.raises(RequestError, match=r"(neither|both) of prompts and prompt_token_ids"):
                llm.generate(**given)  # type: ignore[arg-type]


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<assistant>' * add_generation_prompt }}"


def test_chats_are_prompts_that_a_template_writes(llm: LLM) -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "def a("}]}]
    text = "<user>def a(<assistant>"
    [output] = llm.chat(said, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    right = llm.generate(llm.get_tokenizer().encode(text, add_special_tokens=False), GREEDY, use_tqdm=False)[0]
    assert (output.prompt, output.outputs[0].token_ids) == (text, right.outputs[0].token_ids)
    both = llm.chat([said, said], GREEDY, chat_template=TEMPLATE, add_generation_prompt=False)
    assert [one.prompt for one in both] == ["<user>def a("] * 2
    with pytest.raises(RequestError, match="must be a mapping with a role"):
        llm.chat([{"content": "a"}], chat_template=TEMPLATE)
    with pytest.raises(RequestError, match="chat_template is not a valid template"):
        llm.chat(said, chat_template="{% if %}")
