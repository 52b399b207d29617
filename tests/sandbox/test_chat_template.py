"""Chat templates: the same text as transformers', and nothing that a template does harms who renders it."""

import contextlib
import json
import re
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from quire.errors import ConfigError, ModelError, RequestError
from quire.frontend.tokenizer import Tokenizer
from quire.models import EMBEDDED
from quire.models.hub import DESCRIPTION
from quire.models.template import MAX_SOURCE
from quire.sandbox.chat_template import MAX_CHARACTERS, ChatTemplate, make_renderers
from quire.sandbox.process import Sandbox
from tests.marks import of_long_runs
from tests.sandbox.chat_templates import CHATML, GEMMA, MISTRAL, QWEN3, TEMPLATES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place, in °C & <words>",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {}}},
]


def say(*turns: str) -> list[dict[str, object]]:
    """Messages of users and assistants in turn, the user first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


CHATS = {
    "one": say("Hello"),
    "turns": say("  Hi ", "<think>\nHm.\n</think>\n\nHi!", "漢字 🙂 é\n\nmore", " Yes. ", "{{ 7*7 }} {% if %} <b>&"),
    "system": [{"role": "system", "content": " Be brief. "}, *say("Why?", "Because.", "Oh?")],
    "tools": [
        *say("Weather in Brno?"),
        {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"place": "Brno"}}}]},
        {"role": "tool", "content": "12 °C"},
        {"role": "assistant", "content": "Cold."},
        *say("And the time?"),
    ],
}  # fmt: skip


Render = Callable[..., str]


@pytest.fixture(scope="module")
def renderers() -> Iterator[Sandbox]:
    made = make_renderers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "a secret of the server's")
        made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def rendered(renderers: Sandbox) -> Render:
    return lambda source, content="x": render(renderers, source, content)


def render(renderers: Sandbox, source: str, content: object = "x") -> str:
    return ChatTemplate(source, {}, renderers).render([{"role": "user", "content": content}])


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer(models.BPE({"a": 0}, [])), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_transformers(
    name: str, chat: str, prompted: bool, theirs: PreTrainedTokenizerFast, tmp_path: Path, renderers: Sandbox
) -> None:
    theirs.chat_template = TEMPLATES[name]
    theirs.save_pretrained(tmp_path)
    ours = ChatTemplate.find(tmp_path, renderers=renderers)
    # What is None counts as not given. Older releases of transformers leave that to their callers.
    given = [{key: value for key, value in message.items() if value is not None} for message in CHATS[chat]]
    for tools in (None, TOOLS):
        expected = error = None
        try:
            expected = theirs.apply_chat_template(given, tools, tokenize=False, add_generation_prompt=prompted)
        except Exception as raised:
            error = str(raised)
        if error is None:
            assert ours.render(CHATS[chat], prompted, tools) == expected
        else:
            with pytest.raises(RequestError, match=re.escape(error)):
                ours.render(CHATS[chat], prompted, tools)


class TestFinding:
    SOURCE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"

    @pytest.fixture(autouse=True)
    def share(self, renderers: Sandbox) -> None:
        self.renderers = renderers

    def find(self, directory: Path, override: Path | None = None, **settings: object) -> str | None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        found = ChatTemplate.find(directory, override, self.renderers)
        return None if found is None else found.render(say("x"))

    def test_in_the_tokenizers_settings(self, tmp_path: Path) -> None:
        tokens = {"bos_token": {"content": "<B>", "lstrip": False}, "eos_token": "<E>", "unk_token": None}
        assert self.find(tmp_path, chat_template=self.SOURCE, **tokens) == "<B>x<E>"
        assert self.find(tmp_path, chat_template=self.SOURCE) == "x"
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": self.SOURCE + "d"}]
        assert self.find(tmp_path, chat_template=named, **tokens) == "<B>x<E>d"

    def test_in_a_file_of_its_own_which_comes_first(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text("own {{ eos_token }}\n")
        assert self.find(tmp_path, chat_template="other", eos_token="<E>") == "own <E>"
        (tmp_path / "given.jinja").write_text("given {{ eos_token }}")
        assert self.find(tmp_path, tmp_path / "given.jinja", eos_token="<E>") == "given <E>"
        assert "chat_template.jinja" in DESCRIPTION

    def test_nowhere(self, tmp_path: Path) -> None:
        assert ChatTemplate.find(tmp_path) is None
        assert self.find(tmp_path) is None
        assert self.find(tmp_path, chat_template=[{"name": "rag", "template": "x"}]) is None

    @pytest.mark.parametrize(
        ("source", "told"),
        [
            ("{% for %}", "line 1: "),
            ("\n\n{% if x %}", "line 3: "),
            ("{{ 'a'|centre(9) }}", "No filter named 'centre'"),
            ("{{ " + "[" * 5000 + "]" * 5000 + " }}", "recursion"),
            ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "nested"),
        ],
    )
    def test_a_bad_template_is_told(self, source: str, told: str, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(ModelError, match=r"chat_template\.jinja is not a usable template: .*" + told):
            ChatTemplate.find(tmp_path)
        with pytest.raises(ConfigError, match=told):
            ChatTemplate.find(tmp_path, tmp_path / "chat_template.jinja")

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 10 ** (10 ** 10) }}",
            "{{ 'a'|center(10 ** 12) }}{{ ('a' * 10 ** 7)|join('b' * 10 ** 7) }}",
            "{% set x = 10 ** (10 ** 10) %}{% if 10 ** (10 ** 10) is even %}{% endif %}",
            "{% autoescape 10 ** (10 ** 10) %}{% endautoescape %}",
            "{% generation %}{{ 10 ** (10 ** 10) }}{% endgeneration %}",
        ],
    )
    def test_nothing_is_computed_when_a_template_is_found(self, source: str, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text(source)
        assert ChatTemplate.find(tmp_path, renderers=self.renderers).source == source

    def test_a_bad_file_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"chat_template .*none\.jinja cannot be read"):
            ChatTemplate.find(tmp_path, tmp_path / "none.jinja")
        (tmp_path / "latin.jinja").write_bytes(b"\xe9")
        with pytest.raises(ConfigError, match=r"chat_template .*latin\.jinja cannot be read"):
            ChatTemplate.find(tmp_path, tmp_path / "latin.jinja")
        (tmp_path / "long.jinja").write_text("x" * (MAX_SOURCE + 1))
        with pytest.raises(ConfigError, match=f"has {MAX_SOURCE + 1} bytes"):
            ChatTemplate.find(tmp_path, tmp_path / "long.jinja")


class TestErrors:
    def test_the_templates_own_words(self, rendered: Render) -> None:
        with pytest.raises(RequestError, match=r"^only users speak$"):
            rendered("{{ raise_exception('only ' ~ messages[0].role ~ 's speak') }}")

    @pytest.mark.parametrize(
        ("source", "told"),
        [
            ("{{ nothing.at.all }}", "'nothing' is undefined"),
            ("{{ messages[0].name.first }}", "has no attribute 'name'"),
            ("{{ 'a' + 1 }}", "TypeError"),
            ("{{ 1 // 0 }}", "ZeroDivisionError"),
            ("{% include 'x' %}", "no loader"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ],
    )
    def test_what_does_not_fit_the_messages(self, source: str, told: str, rendered: Render) -> None:
        with pytest.raises(RequestError, match=f"chat template cannot render these messages: .*{told}"):
            rendered(source)

    def test_errors_are_short(self, rendered: Render) -> None:
        with pytest.raises(RequestError) as caught:
            rendered("{{ raise_exception(messages[0].content) }}", "y" * 100_000)
        assert len(str(caught.value)) <= 1000


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ range.__self__.open }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(**{'__init__': 1}) }}",
        "{{ dict.__base__ }}{{ dict.__base__.x }}",
        "{{ lipsum.__globals__.os }}",
    ],
)
def test_python_is_out_of_reach(source: str, rendered: Render) -> None:
    with pytest.raises(RequestError):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('{0.__call__.__func__.__globals__}'|attr('format'))(raise_exception) }}",
        "{{ ('{0.__globals__[time]}'|attr('format'))(strftime_now) }}",
        "{{ ('{0.__globals__}'|attr('format'))(raise_exception) }}",
        "{{ ('{0.__globals__[json].codecs.sys.modules[os].environ[SECRET]}'|attr('format'))(raise_exception) }}",
        "{{ ('{x.__globals__}'|attr('format_map'))({'x': raise_exception}) }}",
        "{% set f = '{0.__globals__}'.format %}{{ f(raise_exception) }}",
        "{% set ns = namespace(f='{0.__globals__}'.format) %}{{ ns.f(raise_exception) }}",
        "{{ ['{0.__globals__}']|map('format', raise_exception)|list }}",
        "{{ ['{0.__globals__}']|map('attr', 'format')|first(raise_exception) }}",
        "{{ (['{0.__globals__}']|map(attribute='format')|first)(raise_exception) }}",
    ],
)
def test_no_way_to_str_format_leaves_the_sandbox(
    source: str, monkeypatch: pytest.MonkeyPatch, rendered: Render
) -> None:
    """CVE-2024-56326 and CVE-2025-27516: this is why jinja2 has the floor it has."""
    monkeypatch.setenv("SECRET", "a secret of the server's")
    with contextlib.suppress(RequestError):  # or what is out of reach is undefined, and prints as nothing
        assert rendered(source) == ""


def test_contents_are_data(rendered: Render) -> None:
    content = "{{ 7*7 }}{% raw %}{{ raise_exception('no') }}{# x #}"
    assert rendered("{{ messages[0].content }}", content) == content
    assert rendered("{{ messages[0].content|tojson }}", content) == json.dumps(content)


DOUBLED = "{%% set ns = namespace(x=%s, y=%s) %%}{%% for i in range(200) %%}%s{%% endfor %%}%s"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Sandbox]:
    """A sandbox with little patience."""
    made = make_renderers(seconds=0.2, memory=2**27)
    yield made
    made.close()


class TestBounds:
    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{% set x %}{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}{% endset %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        ],
        ids=["loops", "a block", "macros"],
    )
    def test_time(self, source: str, hasty: Sandbox) -> None:
        with pytest.raises(RequestError, match=r"it takes longer than 0\.2 s"):
            render(hasty, source)

    def test_rendered_characters(self, rendered: Render) -> None:
        fitting = "x" * (MAX_CHARACTERS // 2)
        assert len(rendered("{{ messages[0].content }}{{ messages[0].content }}", fitting)) == MAX_CHARACTERS
        with pytest.raises(RequestError, match=f"more than {MAX_CHARACTERS:,} characters"):
            rendered("{{ messages[0].content }}{{ messages[0].content }}x", fitting)
        with pytest.raises(RequestError, match=f"more than {MAX_CHARACTERS:,} characters"):
            rendered("{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}", "y" * 10_000)

    MEMORY = (
        "{{ range(10 ** 9) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        DOUBLED % ("'a'", 0, "{% set ns.x = ns.x + ns.x %}", ""),
        DOUBLED % ("[1]", 0, "{% set ns.x = ns.x + ns.x %}", ""),
        DOUBLED % ("[1]", 0, "{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x }}"),
        DOUBLED % (1, 1, "{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}", "{{ ns.x == ns.y }}"),
        "{% set x = range(9000)|list %}{{ [x] * 100000 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ range(1000)|join('x' * 100000) }}",
        "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
        "{{ ('a' * 1000000)|trim('b' * 1000000 ~ 'a') }}",
        "{{ [[1]]|tojson(indent=10 ** 9) }}",
        "{{ 'a'|indent(-10 ** 12) }}{{ 'a' * 10 ** 10 }}",
        "{% for i in range(100000) %}{% set x = ('a,' * 1000000).split(',') %}{% endfor %}",
    )
    MORE = (
        "{{ 10 ** 10 * 'a' }}",
        "{{ [1] * 10 ** 10 }}",
        DOUBLED % (3, 0, "{% set ns.x = ns.x * ns.x %}", ""),
        DOUBLED % ("'a'", 0, "{% set ns.x = ns.x ~ ns.x %}", ""),
        DOUBLED % ("[1]", 0, "{% set ns.x = {1: ns.x, 2: ns.x} %}", "{{ ns.x|tojson }}"),
        DOUBLED % ("[1]", 0, "{% set ns.x = dict(a=ns.x, b=ns.x) %}", "{{ ns.x|string }}"),
        "{% set x = range(5000)|list %}{{ ([''] * 500)|map('default', x, true)|list|upper }}",
        "{% set x = range(9000)|list %}{{ {}.fromkeys(range(100000), x)|lower }}",
        "{% set x = {1: range(1000)|list}.items() %}{{ ([x] * 100000)|lower }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%(a).1000000000f'|format(a=1) }}",
        "{{ ('%(a)s' * 100000) % {'a': 'b' * 100000} }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ('{x}' * 100000).format_map({'x': 'b' * 100000}) }}",
        "{{ 'a'.encode().ljust(10 ** 9) }}",
        "{{ '7'.zfill(10 ** 9) }}",
        "{{ '\\t'.expandtabs(tabsize=10 ** 9) }}",
        "{{ (5).to_bytes(10 ** 9, 'big') }}",
        "{{ ('x' * 100000).join(range(1000)|map('string')) }}",
        "{{ ('a' * 100000)|replace('a', new='b' * 100000) }}",
        "{{ ('a' * 1000000).strip('b' * 1000000 ~ 'a') }}",
    )

    @pytest.mark.slow
    @pytest.mark.parametrize("source", [*MEMORY, *map(of_long_runs, MORE)])
    def test_memory(self, source: str, hasty: Sandbox) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(RequestError):
            render(hasty, source)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024  # kB

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("{{ 'aaa'.translate({97: 'b'}) }}", "bbb"),
            ("{{ 5|round(10 ** 9) }}", "5"),
            ("{{ [[1], [2]]|sum(start=[]) }}", "[1, 2]"),
            ("{{ 'a'|center(3) }}|{{ 'a b'|urlencode }}|{{ [1, 2, 3]|batch(2)|list }}", " a |a%20b|[[1, 2], [3]]"),
        ],
    )
    def test_what_looks_odd_and_costs_nothing_is_rendered(self, source: str, text: str, rendered: Render) -> None:
        assert rendered(source) == text

    def test_a_long_chat_is_no_trouble(self, renderers: Sandbox) -> None:
        turns = say(*["word " * 40] * 1000)
        for source in (CHATML, QWEN3, GEMMA, MISTRAL):
            template = ChatTemplate(source, {"bos_token": "", "eos_token": ""}, renderers)
            assert len(template.render(turns)) > 190_000

    def test_renderings_side_by_side_share_nothing(self, renderers: Sandbox) -> None:
        template = ChatTemplate(QWEN3, {}, renderers)
        chats = [say(f"question {i} " * (i + 1)) for i in range(40)]
        expected = [template.render(chat) for chat in chats]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(template.render, chats * 2)) == expected * 2


class TestEmbeddedModel:
    def test_a_chat_is_a_file(self, renderers: Sandbox) -> None:
        template = ChatTemplate.find(EMBEDDED, renderers=renderers)
        chat = [
            {"role": "system", "content": "Python."},
            *say("Add\ntwo", "\ndef add(a, b):\n    return a + b\n", "Why?"),
        ]
        assert template.render(chat) == (
            "<|endoftext|># Python.\n# Add\n# two\n\ndef add(a, b):\n    return a + b\n\n\n# Why?\n\n"
        )
        assert template.render(say("Hi"), add_generation_prompt=False) == "<|endoftext|># Hi\n"
        tokens = Tokenizer(EMBEDDED).encode(template.render(say("Hi")), add_special_tokens=False)
        assert tokens.count(0) == 1
        compile(template.render(chat).removeprefix("<|endoftext|>"), "<chat>", "exec")

    def test_only_text(self, renderers: Sandbox) -> None:
        with pytest.raises(RequestError, match=r"^the embedded model takes text only; the content of a user message"):
            ChatTemplate.find(EMBEDDED, renderers=renderers).render(
                [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
            )
