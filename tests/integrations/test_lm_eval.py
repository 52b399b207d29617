"""The model of lm_eval's registry. `make clients` runs lm_eval itself, of which two names are replaced here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quire import SamplingParams
from quire.errors import RequestError
from tests import warm

ROOT = Path(__file__).parents[2]
MODULE = "quire.integrations.lm_eval"
warm.install()
SMALL = {"num_blocks": 64, "max_model_len": 96}


class LM:
    """What lm_eval's models inherit."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *given: self.kept.append(given))


REGISTERED: dict[str, type[Any]] = {}


def register_model(name: str) -> Any:
    return lambda cls: REGISTERED.setdefault(name, cls)


@pytest.fixture(scope="module")
def lm() -> Iterator[Any]:
    modules: dict[str, dict[str, Any]] = {"lm_eval": {}, "lm_eval.api": {}, "lm_eval.api.model": {"LM": LM}}
    modules["lm_eval.api.registry"] = {"register_model": register_model}
    with pytest.MonkeyPatch.context() as patch:
        for name, content in modules.items():
            patch.setitem(sys.modules, name, ModuleType(name))
            vars(sys.modules[name]).update(content)
        patch.delitem(sys.modules, MODULE, raising=False)
        found = import_module(MODULE).QuireLM(batch_size="auto", device="cuda:0", **SMALL)
        del sys.modules[MODULE]
    yield found
    found.llm.close()


def asked(*pairs: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=pair) for pair in pairs]


def test_it_is_registered_by_name_and_by_entry_point(lm: Any) -> None:
    assert [*REGISTERED.items()] == [("quire", type(lm))]
    text = (ROOT / "pyproject.toml").read_text()
    [entry] = re.findall(r'^\[project.entry-points."lm_eval.models"\]\nquire = "(.*)"$', text, re.MULTILINE)
    assert entry == f"{MODULE}:{type(lm).__name__}"


def test_log_likelihoods_are_those_of_llm(lm: Any) -> None:
    pairs = [("import ", "os"), ("x =\n", "    1"), ("def f(x):\n    return", " x")]
    expected = lm.llm.loglikelihood([a for a, _ in pairs], [b for _, b in pairs])
    whole = [*pairs, ("", "import os")]
    found = lm.loglikelihood(asked(*whole), disable_tqdm=True)
    assert found[:3] == [(one.cumulative_logprob, one.is_greedy) for one in expected]
    [[alone]] = [lm.llm.loglikelihood([lm.llm.tokenizer.leading_tokens], [lm.llm.tokenizer.encode("import os")[1:]])]
    assert found[3] == (alone.cumulative_logprob, alone.is_greedy)
    assert lm.kept[:4] == [("loglikelihood", pair, one) for pair, one in zip(whole, found, strict=True)]


def test_a_text_that_is_too_long_loses_its_beginning(lm: Any) -> None:
    long = "import os\n" * 60
    [found] = lm.loglikelihood(asked((long, "x = 1")))
    tokens = lm.llm.tokenizer.encode(long + "x = 1")
    count = len(tokens) - len(lm.llm.tokenizer.encode(long.rstrip()))
    [kept] = lm.llm.loglikelihood([tokens[-96:-count]], [tokens[-count:]])
    assert found == (kept.cumulative_logprob, kept.is_greedy)
    with pytest.raises(RequestError, match=r"continuation 1 has \d+ tokens; the model takes 95 at most"):
        lm.loglikelihood(asked(("a", "b"), ("a", long)))
    [text] = lm.generate_until(asked((long, {"max_gen_toks": 5})))
    [output] = lm.llm.generate([tokens[: -count + 1][-91:]], SamplingParams(temperature=0.0, max_tokens=5))
    assert len(output.prompt_token_ids) == 91
    assert isinstance(text, str)


def test_every_token_of_a_long_text_is_scored_once(lm: Any) -> None:
    text = "".join(f"x{i} = {i}\n" for i in range(60))
    tokens = lm.llm.tokenizer.encode(text)
    assert len(tokens) > 200
    windows = lm._windows(text)
    assert [token for _, after in windows for token in after] == tokens[1:]
    assert min(len(before) for before, _ in windows) == 1
    assert all(len(before) + len(after) == 96 for before, after in windows)  # with as much context as fits
    scored = lm.llm.loglikelihood([before for before, _ in windows], [after for _, after in windows])
    [found] = lm.loglikelihood_rolling(asked((text,)))
    assert found == pytest.approx(sum(one.cumulative_logprob for one in scored), abs=1e-9)


def test_texts_are_greedy_unless_a_task_draws(lm: Any) -> None:
    prompts = ["import ", "def area(", "class A:"]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, stop=["\n"])
    expected = [one.outputs[0].text for one in lm.llm.generate(prompts, greedy)]
    arguments = {"until": ["\n"], "max_new_tokens": 12, "temperature": 0.7, "do_sample": False}
    assert lm.generate_until(asked(*((prompt, arguments) for prompt in prompts))) == expected
    drawn = SamplingParams(temperature=0.7, max_tokens=6, top_p=0.9, seed=3)
    [text] = lm.generate_until(asked(("import ", {"max_gen_toks": 6, "temperature": 0.7, "top_p": 0.9, "seed": 3})))
    assert text == lm.llm.generate("import ", drawn)[0].outputs[0].text
    with pytest.raises(RequestError, match="SamplingParams has no field 'num_beams'"):
        lm.generate_until(asked(("import ", {"num_beams": 4})))


def test_chats_are_rendered_by_the_model_s_template(lm: Any) -> None:
    messages = [{"role": "user", "content": "a queue"}]
    text = lm.apply_chat_template(messages)
    assert text == lm.llm.tokenizer.render(messages)
    assert lm.chat_template() == lm.llm.text_files.template()[1]
    tokens = lm._with_first("import os")
    assert tokens[0] == lm.llm.tokenizer.leading_tokens[0]  # which is written once, also if a template has written it
    assert lm._with_first(lm.llm.tokenizer.decode(tokens, skip_special_tokens=False)) == tokens


def test_without_lm_eval_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert MODULE not in sys.modules
    with pytest.raises(ModuleNotFoundError, match=r"lm_eval is missing: pip install 'quire\[eval\]'"):
        import_module(MODULE)
