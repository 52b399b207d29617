"""What callers may ask for, and the errors where they may not."""

import pickle
import re
from array import array
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from quire import BeamSearchParams
from quire.config import FOREIGN, CacheConfig, EngineConfig, engine_config
from quire.errors import ConfigError, QuireError, RequestError
from quire.request import Request, SamplingParams, StructuredOutputsParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 1.5, True, "2", 10**6]),
        ("temperature", [-0.1, NAN, INF, "1", None, True, 1e300, 10**400]),
        ("top_k", [-2, 1.0, None, 2**63]),
        ("top_p", [0, 0.0, -1, 1.1, NAN]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0, -1, NAN, INF, 1e300]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("max_tokens", [0, -5, 1.0]),
        ("min_tokens", [-1, 17, None]),
        ("seed", [-1, 2**63, 1.0]),
        ("logprobs", [-1, True, 1.5]),
        ("prompt_logprobs", [-1, "all"]),
        ("stop", ["", ["a", ""], [1], 5]),
        ("stop_token_ids", [[-1], [1.0], ["a"], [True], 5]),
        ("allowed_token_ids", [[-1], ["a"], 5, []]),
        ("logit_bias", [[1], {3: 101}, {3: -100.5}, {3: NAN}, {3: "1"}]),
        ("a token of logit_bias", [{"3": 1.0}, {-1: 1.0}, {1.5: 1.0}]),
        ("bad_words", ["word", [""], [3], 5]),
        ("structured_outputs", [{"regex": ""}, {"json": 1}, "a"]),
        ("spaces_between_special_tokens", [False, None]),
        ("truncate_prompt_tokens", [0, -2, 1.0]),
    ],
)
def test_every_field_is_checked(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"^{field}.* (is|contains) "):
            SamplingParams(**{field.rpartition(" ")[2]: value})


def test_defaults_are_vllms_and_good_values_pass() -> None:
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_k, p.top_p, p.min_p, p.max_tokens) == (1, 1.0, 0, 1.0, 0.0, 16)
    SamplingParams(
        temperature=0, top_k=-1, top_p=1, min_p=1, max_tokens=None, min_tokens=10**9, seed=2**63 - 1, stop="x"
    )
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=None, stop_token_ids=None).stop_tokens == ()
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_tokens == (3, 4)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_fields_of_vllms_that_ask_for_nothing_are_taken() -> None:
    neutral = {"best_of": None, "use_beam_search": False, "length_penalty": 1.0, "logits_processors": []}
    assert SamplingParams(**neutral, n=2) == SamplingParams(n=2)
    assert BeamSearchParams(beam_width=2, temperature=0.0) == BeamSearchParams(beam_width=2)
    assert StructuredOutputsParams(regex="a", backend=None) == StructuredOutputsParams(regex="a")


def test_a_dictionary_is_a_constraint() -> None:
    asked = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert asked == SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert asked.structure is not None
    with pytest.raises(RequestError, match="has no field 'choices'; did you mean 'choice'"):
        SamplingParams(structured_outputs={"choices": ["a"]})


def test_what_is_no_field_gets_a_sentence() -> None:
    for asked, words in (
        ({"temprature": 1}, "SamplingParams has no field 'temprature'; did you mean 'temperature'?"),
        ({"logits_processors": [len]}, "'logits_processors'; a function of the caller's would stop"),
        ({"best_of": 2}, "'best_of'; ask for n samples"),
        ({"output_kind": 3}, "output_kind is 3; it must be a RequestOutputKind"),
        ({"zzzzzz": 1}, "there are allowed_token_ids, bad_words"),
        ({"stop": "a", "detokenize": False}, "stop is 'a' with detokenize=False"),
        ({"min_tokens": 1, "structured_outputs": StructuredOutputsParams(regex="a")}, "leave one out"),
    ):
        with pytest.raises(RequestError, match=re.escape(words)):
            SamplingParams(**asked)
    for asked, words in (
        ({}, "asks for nothing; give exactly one of json, regex, choice, grammar, json_object"),
        ({"json": "{}", "regex": "a"}, "asks for json and regex"),
        ({"regex": 5}, "structured_outputs.regex is 5; it must be a text"),
        ({"choice": ["a", ""]}, "choice contains ''"),
        ({"choice": "abc"}, "must be a list of texts"),
        ({"choice": []}, "structured_outputs.choice is []; it must be a list of texts, at least one"),
        ({"json": {}, "choice": []}, "asks for json and choice"),
        ({"json": ""}, "structured_outputs.json is ''; it must be a schema"),
        ({"regex": ""}, "structured_outputs.regex is ''; it must be a text that is not empty"),
        ({"grammar": ""}, "structured_outputs.grammar is ''; it must be a text that is not empty"),
        ({"json_object": False}, "structured_outputs.json_object is False; it must be True"),
        ({"structural_tag": "{}"}, "a structural tag is not served"),
        ({"choices": ["a"]}, "did you mean 'choice'?"),
    ):
        with pytest.raises(RequestError, match=re.escape(words)):
            StructuredOutputsParams(**asked)


def test_a_clone_is_equal_and_shares_no_list() -> None:
    asked = SamplingParams(logit_bias={3: 1}, bad_words=["a"], structured_outputs=StructuredOutputsParams(json={}))
    clone = asked.clone()
    assert clone == asked == pickle.loads(pickle.dumps(asked)) == replace(asked, n=1)
    assert clone.bad_words is not asked.bad_words


def test_errors_are_value_errors_of_our_own() -> None:
    assert issubclass(RequestError, QuireError)
    assert issubclass(ConfigError, ValueError)


def test_unknown_options_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no engine option 'max_seqs'; did you mean 'max_num_seqs'"):
        engine_config(max_seqs=3)
    with pytest.raises(ConfigError, match="no engine option 'disable_log_stat'; did you mean 'disable_log_stats'"):
        engine_config(disable_log_stat=True)
    with pytest.raises(ConfigError, match="there are async_scheduling, attention_backend, block_size"):
        engine_config(zzz=3)


def test_options_of_vllms_are_taken_where_they_ask_for_nothing_and_else_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    harmless = {name: option.harmless[-1] for name, option in FOREIGN.items()}
    assert engine_config(**harmless, seed=None, block_size=8) == engine_config(block_size=8)
    for name, option in FOREIGN.items():
        shown = "" if option.is_secret else " is 'some'" if option.others else " (it is 'some')"
        with pytest.raises(ConfigError, match=re.escape(f"{name!r}{shown}; {option.sentence}")):
            engine_config(**{name: "some"})
        if harmless[name] is not None:
            assert f"{name}={harmless[name]!r}: {option.sentence}" in caplog.text
    with pytest.raises(ConfigError, match=r"'pipeline_parallel_size' .it is 2.; tensor_parallel_size divides a model"):
        engine_config(pipeline_parallel_size=2)


def test_memory_is_given_as_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU as a share, which has no effect on a CPU. swap_space is in GiB, and neutral if nothing is swapped."""
    caplog.set_level("INFO")

    def cache(**options: object) -> CacheConfig:
        return engine_config(**options).cache

    assert cache(gpu_memory_utilization=0.9, device="cuda") == CacheConfig(kv_cache_memory=0.9)
    assert cache(gpu_memory_utilization=0.9, device="cuda:1", num_blocks=9) == CacheConfig(num_blocks=9)
    assert cache(gpu_memory_utilization=0.9, device="cuda", kv_cache_memory="1GiB").kv_cache_memory == "1GiB"
    assert cache(kv_cache_memory_bytes=2**30, num_gpu_blocks_override=7) == CacheConfig(
        kv_cache_memory=2**30, num_blocks=7
    )
    assert cache(swap_space=4) == cache(swap_space=0) == cache(gpu_memory_utilization=0.9) == CacheConfig()
    assert len(caplog.records) == 7  # a line each
    assert "gpu_memory_utilization=0.9: on a GPU a number above 0" in caplog.text
    assert cache(swap_space=4, preemption="swap").swap_space == "4GiB"
    assert cache(swap_space=2**31, preemption="swap").swap_space == 2**31
    for value in (0, 1.5, True, "most"):
        with pytest.raises(ConfigError, match=rf"'gpu_memory_utilization' is {value!r}; on a GPU a number above 0"):
            engine_config(gpu_memory_utilization=value)
    caplog.clear()
    engine_config(trust_remote_code=True, limit_mm_per_prompt={"image": 2}, dtype="half", max_num_seqs=None)
    assert [(record.levelname, record.message.split("=")[0]) for record in caplog.records] == [
        ("INFO", "arguments of vLLM's: limit_mm_per_prompt"),
        ("WARNING", "arguments of vLLM's: trust_remote_code"),
    ]


def test_options_reach_their_place() -> None:
    config = engine_config(block_size=32, max_num_seqs=3, kv_cache_memory="1GiB")
    assert engine_config(dtype=torch.bfloat16).dtype == "bfloat16"
    assert config == EngineConfig(max_num_seqs=3, cache=CacheConfig(block_size=32, kv_cache_memory="1GiB"))


@pytest.mark.parametrize(
    ("option", "value"),
    [("block_size", 0), ("block_size", 257), ("block_size", "16"), ("num_blocks", 0), ("max_model_len", 0),
     ("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("seed", -1), ("reproducible", 1)],
)  # fmt: skip
def test_bad_options_are_named_with_their_value(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value!r}"):
        engine_config(**{option: value})


def test_a_fork_inherits_every_field_that_is_not_its_own() -> None:
    """Also a field that is added to Request later: a fork without one would compute other numbers."""
    own = {"id", "tokens", "sample_index", "guide", "to_check", "finish_reason", "cache", "schedule"}
    parent = Request("parent", array("i", [1, 2]), 2, SamplingParams())
    for one in fields(Request):
        setattr(parent, one.name, f"the parent's {one.name}")
    child = Request("child", array("i", [1, 2, 3]), 2, SamplingParams(), 1)
    before = {one.name: getattr(child, one.name) for one in fields(Request)}
    child.inherit(parent)
    for one in fields(Request):
        expected = before[one.name] if one.name in own else f"the parent's {one.name}"
        assert getattr(child, one.name) is expected or getattr(child, one.name) == expected, one.name
