"""What callers may ask for, and the errors where they may not."""

import numpy as np
import pytest
import torch

from quire.config import CacheConfig, EngineConfig, engine_config
from quire.errors import ConfigError, QuireError, RequestError
from quire.request import SamplingParams

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
    ],
)
def test_every_field_is_checked(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"^{field}.* (is|contains) "):
            SamplingParams(**{field: value})


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


def test_errors_are_value_errors_of_our_own() -> None:
    assert issubclass(RequestError, QuireError)
    assert issubclass(ConfigError, ValueError)


def test_unknown_options_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no engine option 'max_seqs'; did you mean 'max_num_seqs'"):
        engine_config(max_seqs=3)
    with pytest.raises(ConfigError, match="the options are async_scheduling, attention_backend, block_size"):
        engine_config(zzz=3)


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
