"""Weights replaced in a loaded model: the bits of a fresh one, no block of the old, nothing changed by a failure."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import weakref
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.engine.beam_driver import BeamDriver
from quire.engine.loops import OverlappedLoop
from quire.errors import ConfigError, EngineAsleep, ModelError, QuireError
from quire.frontend.jobs import BeamSearchJob
from quire.frontend.model_fingerprint import replica_fingerprint
from quire.models import EMBEDDED
from quire.models.weights import Checkpoint
from quire.ops.cpu.linear import PackedLinear
from tests.models import checkpoints
from tests.models.gguf.writer import write_model

PROMPTS = ["import os\nimport sys\n\n\ndef main(argv):\n    " * 4, "class A:\n"]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=500, logprobs=2, ignore_eos=True)  # it has not ended meanwhile
SMALL = {"num_blocks": 64, "draft": "off"}


@cache
def changed(seed: int, *, only: str = "") -> dict[str, Tensor]:
    """The embedded model's weights, somewhat different; those whose names contain `only`."""
    checkpoint, generator = Checkpoint(EMBEDDED), torch.Generator().manual_seed(seed)
    found = {}
    for name in sorted(checkpoint.names):
        old = checkpoint[name].float()
        if only in name:
            found[name] = (old + 0.1 * old.std() * torch.randn(old.shape, generator=generator)).bfloat16()
    return found


def saved(directory: Path, weights: Mapping[str, Tensor]) -> Path:
    """The embedded model with these weights in place of its own."""
    old = Checkpoint(EMBEDDED)
    shutil.copytree(EMBEDDED, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: old[name] for name in old.names} | dict(weights), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("weights") / "new", changed(1))


def bits(llm: LLM, prompts: Any = PROMPTS, params: SamplingParams = PARAMS) -> list[Any]:
    found = llm.generate(prompts, params, use_tqdm=False)
    assert {output.weights_version for output in found} == {llm.weights_version}
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]


def fresh(path: Path, *arguments: Any, **options: Any) -> list[Any]:
    with LLM(str(path), **SMALL | options) as llm:
        return bits(llm, *arguments)


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"draft": "head", "num_speculative_tokens": 2}],
    ids=["bf16", "int8", "int4", "draft head"],
)
def test_bits_are_those_of_a_fresh_model(new: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Of all weights from memory and from a directory, and of some of them after that."""
    some = changed(2, only="layers.1.")
    merged = saved(tmp_path / "merged", changed(1) | some)
    with LLM(**SMALL | options) as llm:
        old = bits(llm)
        all_new = {name: tensor.clone() for name, tensor in changed(1).items()}
        assert llm.update_weights(all_new.items(), "step-1") == "step-1"
        for tensor in all_new.values():  # the caller's next update
            tensor.zero_()
        expected = fresh(new, **options)
        assert bits(llm) == expected != old
        assert llm.update_weights(some) == "2"
        assert bits(llm) == fresh(merged, **options)
        assert llm.update_weights(new) == "3"
        assert bits(llm) == expected
        assert llm.update_weights(EMBEDDED, "back") == "back"
        assert bits(llm) == old


def test_other_models(tmp_path: Path) -> None:
    """Experts of one tensor each, layers that keep a state, and layers that transformers computes."""
    prompt, params = [[3, 5, 7, 11, 13, 17] * 4], SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    for i, (kind, own) in enumerate([("Qwen3Next", {}), ("Llama", {"model_impl": "transformers"})]):
        checkpoints.save(tmp_path / f"{i}", kind)
        options = {"num_blocks": 32, "generation_config": "none", **own}
        with LLM(str(tmp_path / f"{i}"), **options) as llm:
            bits(llm, prompt, params)
            path = tmp_path / f"{i}" / "model.safetensors"
            tensors = {name: tensor * 1.25 for name, tensor in load_file(path).items()}
            llm.update_weights(tensors)
            save_file(tensors, path, {"format": "pt"})
            assert bits(llm, prompt, params) == fresh(tmp_path / f"{i}", prompt, params, **options)


def test_no_block_of_the_old_weights_is_found(tmp_path: Path) -> None:
    """Neither in memory nor on a disk, also by other weights of the same version in another process."""
    options = SMALL | {"kv_disk": str(tmp_path / "blocks")}
    for seed in (1, 2):
        with LLM(**options) as llm:
            bits(llm)
            again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert again[0].num_cached_tokens > 0
            model = weakref.ref(llm.decoder)
            llm.update_weights(changed(seed), "same")
            assert model() is None  # its memory is free
            first = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [output.num_cached_tokens for output in first] == [0, 0]
            again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert again[0].num_cached_tokens > 0
            assert [one.outputs for one in again] == [one.outputs for one in first]
            assert llm.engine.scheduler.manager.disk.flush(10)  # for the next process


def test_fingerprints_name_the_weights() -> None:
    with LLM(**SMALL) as llm:
        found = [dict(replica_fingerprint(llm, None).parts)]
        for weights, version in ((changed(1), "a"), (changed(2), "b"), (changed(1), "a")):
            llm.update_weights(weights, version)
            found.append(dict(replica_fingerprint(llm, None).parts))
    plain, first, second, again = found
    assert first == again  # what the weights are matters, not how they came
    assert {name for name in first if first[name] != plain.get(name)} == {"weights", "weights version"}
    assert len({one["weights"] for one in (plain, first, second)}) == 3


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_stream_continues_with_the_new_weights(new: Path, overlapped: bool) -> None:
    """Its tokens so far are computed again, so the rest is what a fresh model says after them."""
    with LLM(**SMALL, max_num_batched_tokens=32) as llm, LLM(str(new), **SMALL) as other:
        if overlapped:
            llm.engine.loop = OverlappedLoop()
        asked = [GREEDY, SamplingParams(max_tokens=4, prompt_logprobs=1, temperature=0.0)]
        tokens = llm.get_tokenizer().encode(PROMPTS[1])
        long = llm.get_tokenizer().encode(PROMPTS[0] * 2)
        stream = llm.stream([{"prompt_token_ids": tokens}, {"prompt_token_ids": long}], asked)
        found: dict[str, Any] = {}
        while len(found) < 2:  # the long prompt is being computed, of which some logprobs are known
            output = next(stream)
            found[output.request_id] = output
        first, second = sorted(found.values(), key=lambda output: len(output.prompt_token_ids))
        assert 1 < len(second.prompt_logprobs) < len(long)
        llm.update_weights(changed(1), "new")
        for _ in stream:
            pass
        [sample], done = first.outputs, second.outputs[0]
        (zero, before), (count, after) = sample.weights_versions
        assert (zero, before, after) == (0, "0", "new")
        assert 0 < count < len(sample.token_ids) == 30
        rest = SamplingParams(temperature=0.0, max_tokens=30 - count, logprobs=2, ignore_eos=True)
        [expected] = bits(other, [tokens + sample.token_ids[:count]], rest)
        assert (sample.token_ids[count:], sample.logprobs[count:]) == expected
        assert (first.is_mixed, second.is_mixed, done.weights_versions) == (True, False, [(0, "new")])
        [whole] = other.generate([long], asked[1], use_tqdm=False)
        assert second.prompt_logprobs == whole.prompt_logprobs
        assert done.token_ids == whole.outputs[0].token_ids
        llm.engine.scheduler.audit()


def test_tasks_of_an_event_loop() -> None:
    """A prompt continues after a sleep and with new weights; a beam search, which cannot, ends with an error."""

    async def ask() -> tuple[Any, str | None]:
        async with AsyncLLM(**SMALL) as llm:
            stream = llm.generate(PROMPTS[1], LONG)
            async for output in stream:
                if len(output.outputs[0].token_ids) > 3:
                    break
            params = BeamSearchParams(beam_width=2, max_tokens=200, ignore_eos=True)
            search = BeamSearchJob(BeamDriver(llm.engine, "beams", output.prompt_token_ids, params))
            llm.submit(search)
            await llm.sleep()
            assert await llm.is_sleeping()
            with pytest.raises(EngineAsleep, match=r"call wake_up\(\) first"):
                await llm.embed("x")
            found = await asyncio.gather(*(llm.update_weights(changed(i)) for i in (1, 2)), return_exceptions=True)
            [error] = [one for one in found if isinstance(one, Exception)]
            assert isinstance(error, ConfigError)
            assert "by another call meanwhile" in str(error)
            await llm.wake_up()
            async for output in stream:  # noqa: B007
                pass
            await search.ended.wait()
            return output, search.failure

    output, failure = asyncio.run(ask())
    assert failure == "the weights were replaced during the search; start it again"
    [sample] = output.outputs
    [(start, first), (count, second)] = sample.weights_versions
    assert (start, first, second) == (0, "0", "1")
    assert 3 < count < 500 == len(sample.token_ids)
    with LLM(**SMALL) as llm:
        [(tokens, logprobs)] = bits(llm, PROMPTS[1], LONG)
    assert (sample.token_ids[:count], sample.logprobs[:count]) == (tokens[:count], logprobs[:count])


def test_a_failure_changes_nothing(tmp_path: Path) -> None:
    norm, projection = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    tensors = changed(1)
    (tmp_path / "empty").mkdir()
    other = saved(tmp_path / "other", {})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    wrong: list[tuple[Any, str | None, type[QuireError], str]] = [
        (tensors | {projection: tensors[projection][:-1]}, None, ModelError, f"{projection} has shape .* asks for"),
        ({projection: tensors[projection].int()}, None, ModelError, f"{projection} is int32"),
        (tensors | {"model.norm.wait": tensors[norm]}, None, ModelError, "does not use, among them model.norm.wait"),
        ([(norm, tensors[norm])] * 2, None, ModelError, "have model.norm.weight twice"),
        ([norm], None, ModelError, "entry 0 of the given weights is model.norm.weight; it must be a name and"),
        ({}, None, ModelError, "are empty"),
        ({norm: tensors[norm].to("meta")}, None, ModelError, f"{norm} of the given weights cannot be copied"),
        (tmp_path / "none", None, ModelError, "none is no directory"),
        (tmp_path / "empty", None, ModelError, "empty holds no weights"),
        (other, None, ModelError, "has the config.json of another model"),
        (tensors, "0", ConfigError, "version is '0', which the current weights have"),
        (tensors, "", ConfigError, "version is ''; it must be"),
    ]
    with LLM(**SMALL) as llm:
        old = bits(llm)
        files = llm.files
        for weights, version, kind, message in wrong:
            with pytest.raises(kind, match=message):
                llm.update_weights(weights, version)
        for level in (0, 3, True):
            with pytest.raises(ConfigError, match=f"level is {level}; it must be 1"):
                llm.sleep(level)
        llm.group = object()  # in place of other processes
        for change in (llm.sleep, partial(llm.update_weights, tensors)):
            with pytest.raises(ConfigError, match="tensor_parallel_size is 1; several processes"):
                change()
        llm.group = None
        assert (llm.weights_version, llm.files, llm.is_sleeping()) == ("0", files, False)
        [cached, _] = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert cached.num_cached_tokens > 0
        assert bits(llm) == old
    gguf = write_model(tmp_path / "model.gguf")
    with (
        LLM(str(gguf), num_blocks=32) as llm,
        pytest.raises(ModelError, match=r"model\.gguf; weights replace"),
    ):
        llm.update_weights(tensors)
    with LLM(**SMALL, enable_lora=True) as llm:
        for change in (partial(llm.sleep, 2), partial(llm.update_weights, tensors)):
            with pytest.raises(ConfigError, match="enable_lora is True"):
                change()
        llm.sleep()


def memory(llm: LLM) -> tuple[list[Any], list[Any]]:
    """References to the tensors of the blocks, and of the packed weights."""
    blocks = [one for by_layer in llm.engine.runner.cache._memory for one in by_layer.values()]
    packed = [one.packed for one in gc.get_objects() if type(one) is PackedLinear]
    return [weakref.ref(one) for one in blocks], [weakref.ref(one) for one in packed]


def alive(references: list[Any]) -> int:
    return sum(reference() is not None for reference in references)


def test_sleep_frees_memory_and_loses_nothing(tmp_path: Path) -> None:
    with LLM(**SMALL, kv_disk=str(tmp_path)) as llm:
        old = bits(llm)
        stream = llm.stream(PROMPTS[1], GREEDY)
        begun = [next(stream).outputs[0].token_ids[:] for _ in range(4)][-1]
        gc.collect()
        blocks, weights = memory(llm)
        before = alive(weights)
        assert alive(blocks) == len(blocks) > 0
        assert before > 10
        llm.sleep()
        llm.sleep()  # a second one has no effect
        assert (alive(blocks), alive(weights), llm.is_sleeping()) == (0, before, True)
        with pytest.raises(EngineAsleep):
            llm.generate("a", use_tqdm=False)
        llm.wake_up()
        [cached, _] = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert cached.num_cached_tokens > 0  # from the disk
        llm.sleep(level=2)
        assert alive(weights) < before - 10  # other tests' models may be alive
        llm.wake_up()
        llm.wake_up()
        assert bits(llm) == old
        output = [*stream][-1]
        [expected] = bits(llm, PROMPTS[1], GREEDY)
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == expected
        assert begun == expected[0][: len(begun)]


@pytest.mark.parametrize("source", ["head", "model"])
def test_drafts_sleep_and_wake_with_the_model(tmp_path: Path, source: str) -> None:
    of_model = {"draft_model": str(EMBEDDED)} if source == "model" else {}
    with LLM(**SMALL | {"draft": source} | of_model, kv_disk=str(tmp_path), kv_disk_space="10MiB") as llm:
        [prompt] = bits(llm, PROMPTS[1], GREEDY)
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None
        for level in (1, 2, 1):
            drafted = speculation.drafted[source]
            llm.sleep(level)
            gc.collect()
            assert not any(drafter.manager.indexes[0].by_block for drafter in llm.engine._model_drafters())
            assert not any(drafter.runner.cache._memory for drafter in llm.engine._model_drafters())
            llm.wake_up()
            assert bits(llm, PROMPTS[1], GREEDY) == [prompt]
            assert speculation.drafted[source] > drafted


def test_weights_in_memory_alone_are_given_again_before_waking(new: Path) -> None:
    with LLM(**SMALL) as llm:
        llm.update_weights(changed(2), "2")
        llm.sleep(level=2)
        with pytest.raises(ModelError, match="the weights of version '2' were given from memory, and sleep"):
            llm.wake_up()
        with pytest.raises(ModelError, match="the given weights lacks"):
            llm.update_weights(changed(1, only="layers.1."))
        assert llm.update_weights(changed(1)) == "3"  # the second one, but the first was named 2
        assert llm.is_sleeping()
        llm.wake_up()
        assert bits(llm) == fresh(new)
