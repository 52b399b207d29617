"""The fingerprint of a replica: what changes it, what does not, and what is said of two that differ."""

from __future__ import annotations

import copy
import ctypes
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM
from quire.config import CacheConfig, EngineConfig
from quire.errors import BadValue, ConfigError, ModelError
from quire.fingerprint.fingerprint import MAX_PART, Fingerprint
from quire.fingerprint.weights import MAX_PAGES, PAGE, sampled_pages, weights_digest
from quire.frontend import model_fingerprint
from quire.frontend.model_fingerprint import replica_fingerprint
from quire.models import EMBEDDED
from quire.ops import fetching, native
from tests.marks import of_long_runs

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PARTS = st.dictionaries(st.text(max_size=20), st.text(max_size=20), min_size=1, max_size=8)
needs_kernels = pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")

# What an option changes, of all that is in a fingerprint. Rows have the same bits in blocks of every size.
IN: dict[str, tuple[dict[str, Any], set[str]]] = {
    "block_size": ({"block_size": 32}, {"block_size"}),
    "max_model_len": ({"max_model_len": 512}, {"max_model_len"}),
    "kv_cache_dtype": ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype", "cache salt", "bits of attention"}),
    "quantization": ({"quantization": "int8"}, {"quantization", "bits of integer linear"}),
    "quantization_head": ({"quantization_head": "int8"}, {"quantization", "bits of integer linear"}),
    "quantization_activations": (
        {"quantization": "int8", "quantization_activations": "bf16"},
        {"quantization"},
    ),
    "dtype": (
        {"dtype": "float32"},
        {"dtype", "kv_cache_dtype", "cache salt", "bits of linear", "bits of attention", "bits of norm", "bits of rope",
         "bits of activation"},
    ),
    "model_impl": ({"model_impl": "transformers"}, {"layers", "transformers"}),
}  # fmt: skip
OUT: dict[str, dict[str, Any]] = {
    "model": {"model": str(EMBEDDED)},
    "no_mmproj": {"no_mmproj": True},
    "device": {"device": "cpu"},
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "receipts": {"receipts": "/dev/null"},
    "generation_config": {"generation_config": "none"},
    "prefetch": {"prefetch": "t0:2560:t1"},
    "reproducible": {"reproducible": True},
    "max_num_seqs": {"max_num_seqs": 3},
    "state_snapshot_interval": {"state_snapshot_interval": 64},
    "max_num_batched_tokens": {"max_num_batched_tokens": 64},
    "scheduling_policy": {"scheduling_policy": "shortest"},
    "async_scheduling": {"async_scheduling": False},
    "enforce_eager": {"enforce_eager": True},
    "draft": {"draft": "model", "draft_model": str(EMBEDDED)},
    "draft_model": {"draft_model": str(EMBEDDED)},
    "num_speculative_tokens": {"num_speculative_tokens": 0},
    "enable_lora": {"enable_lora": True},
    "max_loras": {"enable_lora": True, "max_loras": 3},
    "max_lora_rank": {"enable_lora": True, "max_lora_rank": 8},
    "seed": {"seed": 7},
    "num_blocks": {"num_blocks": 77},
    "kv_cache_memory": {"num_blocks": None, "kv_cache_memory": "8MiB"},
    "enable_prefix_caching": {"enable_prefix_caching": False},
    "preemption": {"preemption": "swap", "swap_space": "8MiB"},
    "swap_space": {"preemption": "swap", "swap_space": "16MiB"},
    "kv_disk": {"kv_disk": mkdtemp()},
    "kv_disk_space": {"kv_disk": mkdtemp(), "kv_disk_space": "1MiB"},
    "prompt_cache_share": {"prompt_cache_share": 0.25},
}


def loaded(**options: Any) -> LLM:
    return LLM(**({"num_blocks": 64} | options))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return loaded()


@pytest.fixture(scope="module")
def fingerprint(llm: LLM) -> Fingerprint:
    return replica_fingerprint(llm, TEMPLATE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the embedded model, to be changed."""
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model"))


@pytest.fixture
def _own_prefetch() -> Iterator[None]:
    """How memory is fetched is the process's: as it was, after a test."""
    yield
    library = native.default()
    fetching.apply(ctypes.CDLL(str(library.path)), library.fetching)


def flip(path: Path, place: int) -> None:
    """Change the lowest bit of one byte."""
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


# ------------------------------------------------------------------------------------------- of a loaded model


@needs_kernels
def test_two_loads_agree_wherever_the_files_lie(tmp_path: Path, fingerprint: Fingerprint) -> None:
    for path in EMBEDDED.iterdir():  # as the hub's cache has it
        (tmp_path / path.name).symlink_to(path)
    again = replica_fingerprint(loaded(model=str(tmp_path)), TEMPLATE)
    assert again == fingerprint
    assert again.digest == fingerprint.digest


@needs_kernels
def test_it_is_the_same_in_and_after_work(llm: LLM, fingerprint: Fingerprint) -> None:
    stream = llm.stream([[5, 6, 7] * 20])
    next(stream)
    assert replica_fingerprint(llm, TEMPLATE) == fingerprint
    stream.close()
    assert replica_fingerprint(llm, TEMPLATE) == fingerprint


def test_each_option_is_in_or_out_and_the_module_says_why() -> None:
    options = {one.name for config in (EngineConfig, CacheConfig) for one in fields(config)} - {"cache"}
    files = {"gguf_file", "mmproj", "tokenizer"}
    assert {*IN, "attention_backend", *files} | OUT.keys() == options
    assert not IN.keys() & OUT.keys()
    assert model_fingerprint.__doc__ is not None
    inside, _, outside = model_fingerprint.__doc__.partition("    out ")
    assert all(name in inside for name in {*IN, "attention_backend"})
    assert all(name in outside for name in {*OUT, *files})


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", IN)
def test_what_an_option_changes(name: str, fingerprint: Fingerprint) -> None:
    options, expected = IN[name]
    other = replica_fingerprint(loaded(**options), TEMPLATE)
    assert set(fingerprint.difference(other)) == expected
    assert other.digest != fingerprint.digest


# All of them at once, but for those that start processes or exclude others; with --long each of them alone.
TOGETHER = [name for name in OUT if name not in ("tensor_parallel_size", "kv_cache_memory", "enable_prefix_caching")]


@needs_kernels
@pytest.mark.slow
@pytest.mark.usefixtures("_own_prefetch")
@pytest.mark.parametrize("names", [TOGETHER, *(of_long_runs([name]) for name in OUT)], ids=lambda names: names[0])
def test_options_that_change_no_bit(names: list[str], fingerprint: Fingerprint) -> None:
    options = {key: value for name in names for key, value in OUT[name].items()}
    other = replica_fingerprint(loaded(**options), TEMPLATE)
    assert fingerprint.difference(other) == ()
    assert other.digest == fingerprint.digest


@needs_kernels
def test_an_option_counts_as_what_it_comes_to(fingerprint: Fingerprint) -> None:
    explicit = {"dtype": "bfloat16", "attention_backend": "cpu", "model_impl": "quire", "max_model_len": 1024}
    assert replica_fingerprint(loaded(**explicit), TEMPLATE) == fingerprint


@needs_kernels
@pytest.mark.slow
def test_each_file_has_its_name(directory: Path, fingerprint: Fingerprint) -> None:
    def difference(template: str | None = TEMPLATE) -> tuple[str, ...]:
        return fingerprint.difference(replica_fingerprint(loaded(model=str(directory)), template))

    def rewrite(name: str, **changes: Any) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    assert difference() == ()
    assert difference(TEMPLATE + " ") == ("template",)
    assert difference(None) == ("template",)
    rewrite("config.json")  # the same in other words
    assert difference() == ()
    rewrite("config.json", initializer_range=0.03)
    assert difference() == ("config",)
    rewrite("generation_config.json", eos_token_id=[0, 3])
    assert difference() == ("config", "end tokens")
    rewrite("tokenizer.json", normalizer={"type": "NFC"})
    assert difference() == ("config", "end tokens", "tokenizer")
    flip(directory / "model.safetensors", -1 + (directory / "model.safetensors").stat().st_size)
    assert difference() == ("config", "end tokens", "tokenizer", "weights")
    (directory / "tokenizer.json").unlink()
    assert difference() == ("config", "end tokens", "tokenizer", "weights")


@needs_kernels
def test_no_fingerprint_where_bits_depend_on_the_batch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="attention_backend is 'gather', which does not give the same bits"):
        replica_fingerprint(loaded(attention_backend="gather", num_speculative_tokens=0), TEMPLATE)
    on_gpu = copy.copy(llm)
    on_gpu.config = replace(llm.config, device="cuda:0")
    with pytest.raises(ConfigError, match=r"reproducible is False; on 'cuda:0' .* Set reproducible=True"):
        replica_fingerprint(on_gpu, TEMPLATE)
    monkeypatch.setattr(llm.decoder, "rows_are_batch_invariant", False)
    with pytest.raises(ConfigError, match=r"has no fingerprint: in layers that transformers computes"):
        replica_fingerprint(llm, TEMPLATE)


# ------------------------------------------------------------------------------------------------- of its weights


@pytest.mark.parametrize("count", [0, 1, 2, MAX_PAGES - 1, MAX_PAGES, MAX_PAGES + 1, 1859, 10**6])
def test_pages_are_sampled_evenly_from_the_first_to_the_last(count: int) -> None:
    pages = sampled_pages(count)
    assert len(pages) == len(set(pages)) == min(count, MAX_PAGES)
    assert pages == sorted(pages)
    if count:
        assert (pages[0], pages[-1]) == (0, count - 1)
    steps = {b - a for a, b in pairwise(pages)}
    assert not steps or max(steps) - min(steps) <= 1


def test_a_changed_byte_of_a_sampled_page_is_seen(directory: Path) -> None:
    path, found = directory / "model.safetensors", {weights_digest(directory)}
    pages = sampled_pages(-(-path.stat().st_size // PAGE))
    for page in pages:
        flip(path, page * PAGE + 17)
        found.add(weights_digest(directory))
    assert len(found) == 1 + len(pages)
    between = next(page for page in range(10, 100) if page not in pages)
    flip(path, between * PAGE)  # what is promised, and no more
    assert weights_digest(directory) in found


def test_names_sizes_and_headers_of_weights_count(directory: Path) -> None:
    path, found = directory / "model.safetensors", {weights_digest(directory)}
    size = int.from_bytes(path.read_bytes()[:8], "little")
    assert size + 8 > PAGE  # so that its end is no sampled page
    flip(path, 8 + size - 3)
    found.add(weights_digest(directory))
    with path.open("ab") as file:
        file.write(bytes(PAGE))
    found.add(weights_digest(directory))
    path.rename(directory / "other.safetensors")
    found.add(weights_digest(directory))
    shutil.copy(directory / "other.safetensors", directory / "more.safetensors")
    found.add(weights_digest(directory))
    assert len(found) == 5


def test_other_files_of_the_directory_do_not_count(directory: Path) -> None:
    before = weights_digest(directory)
    (directory / "pytorch_model.bin").write_bytes(b"the same in another form")
    (directory / "README.md").unlink()
    assert weights_digest(directory) == before


def test_old_state_dicts_are_weights_too(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(3 * PAGE + 5))
    before = weights_digest(tmp_path)
    flip(path, 3 * PAGE + 4)
    assert weights_digest(tmp_path) != before


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights; a replica is known by the files"):
        weights_digest(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=f"has 10 bytes, but its header has a length of {2**40}"):
        weights_digest(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        weights_digest(tmp_path)


# ------------------------------------------------------------------------------------------------ of any replica


@pytest.mark.slow
@settings(deadline=None)
@given(PARTS)
def test_there_and_back(parts: dict[str, str]) -> None:
    fingerprint = Fingerprint(parts)
    again = Fingerprint.from_json(json.loads(json.dumps(fingerprint.to_json())))
    assert again == fingerprint
    assert again.digest == fingerprint.digest
    assert len(again.digest) == 16


@pytest.mark.slow
@settings(deadline=None)
@given(PARTS, PARTS)
def test_digests_are_equal_where_nothing_differs(one: dict[str, str], other: dict[str, str]) -> None:
    a, b = Fingerprint(one), Fingerprint(other)
    assert a.difference(b) == b.difference(a)
    assert (a.difference(b) == ()) == (a.digest == b.digest) == (one == other)
    assert Fingerprint(dict(reversed(one.items()))).digest == a.digest


def test_a_part_ends_where_it_ends() -> None:
    parts = [{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "", "bc": ""}, {"a": "", "b": "c"}, {"abc": ""}]
    assert len({Fingerprint(one).digest for one in parts}) == len(parts)


def test_the_names_of_what_differs() -> None:
    a = Fingerprint({"weights": "1", "torch": "2.11", "dtype": "float32"})
    b = Fingerprint({"weights": "2", "torch": "2.12", "dtype": "float32", "transformers": "5"})
    assert a.difference(b) == ("torch", "transformers", "weights")


GOOD = Fingerprint({"torch": "2.11"}).to_json()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "a fingerprint is a list; it must be an object"),
        (None, "a fingerprint is a NoneType; it must be an object"),
        ({}, r"a fingerprint has the keys \[\]; it must have digest and parts"),
        (GOOD | {"more": 1}, r"has the keys \['digest', 'more', 'parts'\]"),
        (GOOD | {"digest": 7}, "digest is 7; it must be 16 hexadecimal digits"),
        (GOOD | {"digest": "A" * 16}, "digest is 'A{16}'; it must be 16 hexadecimal digits"),
        (GOOD | {"digest": "0" * 1000}, "digest is '0{79}; it must be"),
        (GOOD | {"digest": "0" * 16}, "digest is 0{16}; its parts have"),
        (GOOD | {"parts": []}, "parts of type list; it must have an object of 1 to 256"),
        (GOOD | {"parts": {}}, "has 0 parts; it must have an object of 1 to 256"),
        (GOOD | {"parts": {str(i): "" for i in range(257)}}, "has 257 parts"),
        (GOOD | {"parts": {"torch": 2.11}}, "part 'torch' is 2.11; both must be texts"),
        (GOOD | {"parts": {"torch": "x" * (MAX_PART + 1)}}, f"has {MAX_PART + 1} characters; the most is {MAX_PART}"),
        (GOOD | {"parts": {"torch": "2.12"}}, "digest is [0-9a-f]{16}; its parts have [0-9a-f]{16}"),
    ],
)
def test_what_is_no_fingerprint(data: object, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        Fingerprint.from_json(data)


@pytest.mark.slow
@settings(deadline=None)
@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.dictionaries(st.text(max_size=5), x)))
def test_no_data_breaks_it(data: object) -> None:
    for one in (data, {"digest": data, "parts": data}, GOOD | {"parts": data}):
        with pytest.raises(BadValue):
            Fingerprint.from_json(one)
