"""Scripts for vLLM run after a change of their imports: each is what a user would write, and checks what it gets."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import LLM
from quire.config import FOREIGN
from quire.models import EMBEDDED
from tests.models.adapters import embedded_linears, save_adapter
from tools.docs import PARTS, PLACE, escaped

PAGE = Path(__file__).parent.parent / "docs" / "coming-from-vllm.md"
# By the feature that each is about. MODEL is the embedded model's directory, ADAPTER that of an adapter.
SCRIPTS = {
    "generate": """
from vllm import LLM, SamplingParams

prompts = ["import os", "def read_json(path):", "class Stack:"]
llm = LLM(model=MODEL, tokenizer=MODEL, tokenizer_mode="auto", trust_remote_code=True, dtype="auto", seed=0,
          quantization=None, load_format="auto", gpu_memory_utilization=0.9, swap_space=4, cpu_offload_gb=0,
          enforce_eager=True, max_seq_len_to_capture=8192, disable_custom_all_reduce=False, max_num_seqs=8,
          tensor_parallel_size=1, distributed_executor_backend=None, enable_chunked_prefill=True,
          limit_mm_per_prompt={"image": 1}, disable_log_stats=True)
outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, ignore_eos=True))
for prompt, output in zip(prompts, outputs):
    assert output.prompt == prompt and output.finished
    assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length"
""",
    "chat": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
conversation = [
    {"role": "system", "content": "write Python"},
    {"role": "user", "content": "add two numbers"},
    {"role": "assistant", "content": "def add(a, b):"},
    {"role": "user", "content": "subtract them"},
]
outputs = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
assert len(outputs) == 1
assert "# write Python\\n# add two numbers\\n\\ndef add(a, b):\\n\\n\\n# subtract them\\n" in outputs[0].prompt
""",
    "chats in a batch": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
conversations = [[{"role": "user", "content": f"count to {n}"}] for n in range(3)]
outputs = llm.chat(messages=conversations, sampling_params=llm.get_default_sampling_params(), use_tqdm=False)
assert ["count to 2" in output.prompt for output in outputs] == [False, False, True]
alone = llm.chat(conversations[1], SamplingParams(temperature=0, max_tokens=8))
together = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=8))
assert together[1].outputs[0].token_ids == alone[0].outputs[0].token_ids
""",
    "tools": """
import json
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
weather = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
messages = [{"role": "user", "content": "is it raining in Rome?"}]
template = "{% for tool in tools %}# {{ tool.function | tojson }}{% endfor %}{{ messages[0].content }}"
call = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}
sampling = SamplingParams(temperature=0, max_tokens=32, structured_outputs={"json": call})
[output] = llm.chat(messages, sampling, tools=[{"type": "function", "function": weather}], chat_template=template)
assert json.loads(output.prompt[2:output.prompt.index("is it")]) == weather
assert json.loads(output.outputs[0].text)["city"] in ("Rome", "Oslo")
""",
    "chat_template_kwargs": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
template = "{{ messages[0].content }}{% if not enable_thinking %}<think></think>{% endif %}"
for thinking, end in ((True, "why"), (False, "why<think></think>")):
    [output] = llm.chat([{"role": "user", "content": "why"}], SamplingParams(max_tokens=1), chat_template=template,
                        chat_template_kwargs={"enable_thinking": thinking})
    assert output.prompt == end
""",
    "logprobs": """
import math
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
[output] = llm.generate("import ", SamplingParams(temperature=0, max_tokens=4, logprobs=5))
[sample] = output.outputs
assert math.isclose(sample.cumulative_logprob, sum(p[t].logprob for t, p in zip(sample.token_ids, sample.logprobs)))
for token, position in zip(sample.token_ids, sample.logprobs):
    assert len(position) == 5 and position[token].rank == 1  # greedy
    assert sum(math.exp(found.logprob) for found in position.values()) <= 1.0001
    assert position[token].decoded_token in sample.text
""",
    "prompt_logprobs": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
[output] = llm.generate("for i in range(10):", SamplingParams(max_tokens=1, prompt_logprobs=0))
first, *others = output.prompt_logprobs
assert first is None
assert [list(position) for position in others] == [[token] for token in output.prompt_token_ids[1:]]
""",
    "beam search": """
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
[found] = llm.beam_search([{"prompt": "import"}], BeamSearchParams(beam_width=4, max_tokens=6, temperature=0.0))
[greedy] = llm.generate("import", SamplingParams(temperature=0, max_tokens=6, logprobs=0))
assert len(found.sequences) == 4
assert all(sequence.text.startswith("import") for sequence in found.sequences)
assert found.sequences[0].cum_logprob >= greedy.outputs[0].cumulative_logprob - 1e-4
""",
    "embed": """
from dataclasses import asdict
from vllm import LLM, EngineArgs, EmbeddingRequestOutput
from vllm.outputs import PoolingRequestOutput

arguments = EngineArgs(model=MODEL, runner="pooling", enforce_eager=True, gpu_memory_utilization=0.5, max_num_seqs=8)
llm = LLM(**asdict(arguments))
prompts = ["import os", "class Queue:"]
embedded, encoded = llm.embed(prompts), llm.encode(prompts, pooling_task="embed")
for one, other in zip(embedded, encoded):
    assert isinstance(one, EmbeddingRequestOutput) and isinstance(other, PoolingRequestOutput)
    assert other.outputs.data.tolist() == one.outputs.embedding
    assert abs(other.outputs.data.norm() - 1) < 1e-5
for served in (lambda: llm.classify(prompts), lambda: llm.encode(prompts, pooling_task="classify")):
    try:
        served()
    except ValueError as error:
        assert "classif" in str(error)
    else:
        raise RuntimeError("a model without a classification head has classified")
""",
    "score": """
from vllm import LLM

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
queries = "how to read a file"
found = llm.score(queries, ["open(path).read()", queries])
assert abs(found[1].outputs.score - 1) < 1e-5 and found[0].outputs.score < found[1].outputs.score
""",
    "JSON": """
from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

class Point(BaseModel):
    x: int
    y: int

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
schema = Point.model_json_schema() | {"additionalProperties": False}
params = SamplingParams(max_tokens=64, seed=1, structured_outputs=StructuredOutputsParams(json=schema))
[output] = llm.generate("point = ", params)
assert isinstance(Point.model_validate_json(output.outputs[0].text).x, int)
""",
    "regex": """
import re
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
pattern = r"[a-z]{3,8}@[a-z]{3,8}[.]com\\n"
address = StructuredOutputsParams(regex=pattern, backend=None)
[output] = llm.generate("address: ", SamplingParams(structured_outputs=address, stop=["\\n"], max_tokens=40))
assert re.fullmatch(pattern, output.outputs[0].text + "\\n")
""",
    "choice": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
params = SamplingParams(temperature=0, structured_outputs={"choice": ["positive", "negative"]})
outputs = llm.generate(["I like it: ", "I hate it: "], params)
assert all(output.outputs[0].text in ("positive", "negative") for output in outputs)
""",
    "grammar": """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
query = 'start: "SELECT " column " FROM " table\\ncolumn: "a" | "b"\\ntable: "t" | "u"'
[output] = llm.generate("-- ", SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(grammar=query)))
assert output.outputs[0].text in {f"SELECT {column} FROM {table}" for column in "ab" for table in "tu"}
""",
    "n samples": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
params = SamplingParams(n=3, best_of=None, use_beam_search=False, temperature=1.0, max_tokens=8, logprobs=0)
[output] = llm.generate("def ", params)
assert [sample.index for sample in output.outputs] == [0, 1, 2]
best = max(output.outputs, key=lambda sample: sample.cumulative_logprob)
assert best.cumulative_logprob == max(sample.cumulative_logprob for sample in output.outputs)
""",
    "logit_bias": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
[wanted] = llm.get_tokenizer().encode("import", add_special_tokens=False)
[output] = llm.generate("x", SamplingParams(temperature=0, max_tokens=3, logit_bias={wanted: 100.0}))
assert output.outputs[0].token_ids == [wanted] * 3
[output] = llm.generate("x", SamplingParams(max_tokens=3, allowed_token_ids=[wanted]))
assert output.outputs[0].token_ids == [wanted] * 3
""",
    "bad_words": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
[free] = llm.generate("import ", SamplingParams(temperature=0, max_tokens=4))
word = free.outputs[0].text.split()[0]
[without] = llm.generate("import ", SamplingParams(temperature=0, max_tokens=4, bad_words=[word]))
assert not without.outputs[0].text.startswith(word)
""",
    "seed": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
seeds = [7, 8, 7]
outputs = llm.generate(["class A"] * 3, [SamplingParams(seed=seed, temperature=1.0, max_tokens=16) for seed in seeds])
texts = [output.outputs[0].text for output in outputs]
assert texts[0] == texts[2] != texts[1]
""",
    "LoRA": """
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(model=MODEL, enable_lora=True, max_loras=2, max_lora_rank=8, max_num_seqs=8)
greedy, adapter = SamplingParams(temperature=0, max_tokens=8), LoRARequest("sql", 1, ADAPTER)
[plain] = llm.generate("SELECT", greedy)
[adapted] = llm.generate("SELECT", greedy, lora_request=adapter)
both = llm.generate(["SELECT"] * 2, greedy, lora_request=[None, adapter])
assert [output.outputs[0].text for output in both] == [plain.outputs[0].text, adapted.outputs[0].text]
assert plain.outputs[0].text != adapted.outputs[0].text
[named] = llm.generate("SELECT", greedy, lora="sql")  # Quire's own way
assert named.outputs[0].text == adapted.outputs[0].text
[answer] = llm.chat([{"role": "user", "content": "hi"}], greedy, lora_request=adapter)
[other] = llm.chat([{"role": "user", "content": "hi"}], greedy)
assert answer.prompt == other.prompt and answer.outputs[0].text != other.outputs[0].text
try:
    llm.generate("SELECT", greedy, lora_request=LoRARequest("sql", 1, MODEL))
except ValueError as error:
    assert "the adapter of that name is from" in str(error)
else:
    raise RuntimeError("one name has two adapters")
""",
    "TokensPrompt": """
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.inputs import TextPrompt

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
tokens = llm.get_tokenizer().encode("def f(x):")
prompts = [TokensPrompt(prompt_token_ids=tokens), TextPrompt(prompt="def f(x):", cache_salt="a tenant")]
one, other = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
assert one.prompt_token_ids == other.prompt_token_ids == tokens
assert one.outputs[0].token_ids == other.outputs[0].token_ids
""",
    "AsyncLLM": """
import asyncio
from vllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

async def stream(engine, kind, **options):
    params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=42, stop=["zzz"], output_kind=kind)
    texts = []
    async for output in engine.generate(request_id="one", prompt="def f(", sampling_params=params, **options):
        texts.append(output.outputs[0].text)
    assert output.finished and output.metrics.first_token_latency > 0
    return texts

async def main():
    arguments = AsyncEngineArgs(model=MODEL, enforce_eager=True, enable_lora=True, max_num_seqs=8, swap_space=4)
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        [whole] = await stream(engine, RequestOutputKind.FINAL_ONLY)
        parts = await stream(engine, RequestOutputKind.DELTA)
        grown = await stream(engine, RequestOutputKind.CUMULATIVE)
        assert len(parts) > 1 and "".join(parts) == whole == grown[-1]
        assert all(text.startswith(before) for before, text in zip(grown, grown[1:]))
        adapter = LoRARequest("sql", 1, ADAPTER)
        [adapted] = await stream(engine, RequestOutputKind.FINAL_ONLY, lora_request=adapter)
        assert adapted != whole
    finally:
        engine.shutdown()

asyncio.run(main())
""",
    "metrics": """
from vllm import LLM, BeamSearchParams, SamplingParams
from vllm.metrics import Counter, Gauge, Histogram, Vector

llm = LLM(model=MODEL, disable_log_stats=False, max_num_seqs=8)
llm.generate(["import os", "class Stack:"], SamplingParams(max_tokens=5, ignore_eos=True, n=2))
llm.beam_search("import", BeamSearchParams(beam_width=2, max_tokens=2))
found = {}
for metric in llm.get_metrics():
    assert isinstance(metric, (Counter, Gauge, Histogram, Vector)) and metric.labels["model_name"] == MODEL
    if metric.labels.get("finished_reason", "length") == "length":
        found[metric.name.partition(":")[2]] = metric
assert found["generation_tokens"].value == 20 and found["request_success"].value == 4
assert found["num_requests_running"].value == 0 and isinstance(found["num_requests_running"], Gauge)
lengths = found["request_generation_tokens"]
assert (lengths.count, lengths.sum, lengths.buckets["2.0"], lengths.buckets["5.0"]) == (4, 20, 0, 4)
assert lengths.buckets["+Inf"] == 4 and list(lengths.buckets)[-1] == "+Inf"
assert found["inter_token_latency_seconds"].count == 16 and found["time_to_first_token_seconds"].count == 4
""",
    "times": """
import time
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, gpu_memory_utilization=0.5, max_num_seqs=8)
before, ticks = time.time(), time.monotonic()
[output] = llm.generate("import os", SamplingParams(max_tokens=6, ignore_eos=True, n=2))
after, found = time.time(), output.metrics
assert before - 1 < found.arrival_time < found.first_token_time < found.finished_time < after + 1
assert ticks <= found.queued_ts < found.first_token_ts < found.last_token_ts <= time.monotonic()
assert found.num_generation_tokens == 12
assert 0 <= found.num_accepted_tokens <= found.num_draft_tokens
[embedded] = [llm.encode("import os")[0]]
assert embedded.finished
""",
    "prefix caching": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.5, max_num_seqs=8)
llm.reset_prefix_cache()
table = "".join(f"# row {i} has {i * i}\\n" for i in range(40))
params = SamplingParams(temperature=0, max_tokens=4)
[first] = llm.generate(table + "a = ", params)
[second] = llm.generate(table + "b = ", params)
assert first.num_cached_tokens == 0
assert len(second.prompt_token_ids) - 32 < second.num_cached_tokens < len(second.prompt_token_ids)
""",
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    save_adapter(directory, embedded_linears())
    return directory


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., LLM]]:
    """`LLM`, but scripts that ask for the same get the same one."""
    made: list[LLM] = []

    @cache
    def make(options: str) -> LLM:
        made.append(LLM(**eval(options)))
        return made[-1]

    # `enable_prefix_caching` is the default, and the neutral ones of EngineArgs are None.
    defaults = {"enable_prefix_caching": True, "enforce_eager": True, "runner": "pooling"}

    def shared(**options: Any) -> LLM:
        return make(repr({key: one for key, one in options.items() if one not in (None, defaults.get(key))}))

    yield shared
    for llm in made:
        llm.close()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_after_its_imports_are_changed(
    name: str, adapter: Path, engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quire, "LLM", engines, raising=False)
    script, changed = re.subn(r"^from vllm(?=[. ])", "from quire", SCRIPTS[name], flags=re.MULTILINE)
    assert changed
    exec(compile(script, name, "exec"), {"MODEL": str(EMBEDDED), "ADAPTER": str(adapter), "__name__": "__main__"})


def test_the_page_lists_every_argument_and_names_what_is_there() -> None:
    page = PAGE.read_text()
    [part] = PLACE.findall(page)
    rows = {line.split("|")[1].strip(" `"): line for line in PARTS[part]().splitlines()[2:]}
    assert rows.keys() == FOREIGN.keys()
    for name, foreign in FOREIGN.items():
        assert rows[name].endswith(f"| {escaped(foreign.sentence)} |")
        assert all(f"`{value!r}`" in rows[name] for value in foreign.harmless if value is not None)
    for named in re.findall(r"`(quire\.\w+(?:\.\w+)*)`", page):
        module, _, name = named.rpartition(".")
        assert importlib.util.find_spec(named) or getattr(importlib.import_module(module), name), named
    [methods] = re.findall(r"^- (`generate`, `chat`.*?) of `LLM`", page, re.MULTILINE | re.DOTALL)
    assert all(hasattr(LLM, name) for name in re.findall(r"`(\w+)`", methods))
