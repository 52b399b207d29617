"""The chat page at /: reasoning, ends of answers, markdown, edits and models, in a real browser and without one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire.models import EMBEDDED
from quire.server.api import start_page
from tests.models.adapters import embedded_linears, save_adapter
from tests.models.image_checkpoints import pictures, save_images_model
from tests.server.browsing import FAULTS, open_browser
from tests.server.serving import SMALL, Serving, serving

pytestmark = pytest.mark.slow

VENDOR = start_page.PAGE.parent / "vendor"
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""
MARKDOWN = """Read it **so**:

```python
with open("a file whose name is long enough for a line that no telephone can show") as file:
    json.load(file)
```

| call | returns |
|---|---|
| `read_json("a_file_with_a_long_name.json")` | a_dictionary_with_a_long_name |
"""
HOSTILE = """A [link](javascript:hacked=1), another <https://example.org/>, ![a picture](http://127.0.0.1:1/a.png)

<img src="http://127.0.0.1:1/b.png" onerror="hacked=2"><script>hacked=3</script>
<iframe srcdoc="<script>parent.hacked=4</script>"></iframe>

text <svg onload="hacked=5"></svg> <a href="javascript:hacked=6" onclick="hacked=7">text</a>
"""
UNSAFE = """<a href="javascript:hacked=8">a</a><img src="x"><script>hacked=9</script><svg><a href="data:,"></a></svg>b\
<form action="/"><button>send</button></form><p id="prompt">c</p>"""

STOP_EARLY = """new MutationObserver((_, observer) => {
  if (!document.querySelector(".thinking")) return;
  observer.disconnect();
  $("stop").click();
}).observe($("messages"), { childList: true, subtree: true })"""


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model of a directory, with an adapter. It always thinks, and never stops on its own."""
    directory = tmp_path_factory.mktemp("thinking")
    (directory / "model").symlink_to(EMBEDDED)
    (directory / "think.jinja").write_text(TEMPLATE)
    save_adapter(directory / "sql", embedded_linears(), spread=0.08)
    with serving(
        SMALL | {"model": str(directory / "model"), "max_loras": 2, "max_lora_rank": 8},
        lora=(f"sql={directory / 'sql'}",),
        served_model_name=("thinker",),
        chat_template=directory / "think.jinja",
        reasoning_parser="qwen3",
    ) as running:
        yield running


# ------------------------------------------------------------------------------------------------- without a browser


def html(server: Serving) -> str:
    answer = server.ask("GET", "/", None, {"Accept": "text/html"})
    text = answer.body.decode()
    sums = [
        base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()
        for one in re.findall("<script>(.*?)</script>", text, re.DOTALL)
    ]
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["img-src"] == "data:"
    assert policy["script-src"].split() == [f"'sha256-{one}'" for one in sums]  # no other script runs
    assert "unsafe" not in answer.headers["content-security-policy"]
    return text


def test_the_libraries_are_those_of_the_registry() -> None:
    """As their table describes them; the page has them, so that it loads nothing."""
    rows = re.findall(r"^\| `(\S+)` \|.*`(LICENSE-\w+)` \| `(\w{64})` \|$", (VENDOR / "README.md").read_text(), re.M)
    assert {file for file, _, _ in rows} == {path.name for path in VENDOR.glob("*.js")}
    page = start_page.PAGE.read_text()
    for file, licence, digest in rows:
        assert hashlib.sha256((VENDOR / file).read_bytes()).hexdigest() == digest
        assert (VENDOR / licence).stat().st_size > 1000
        assert f'<script src="vendor/{file}">' in page


def test_the_embedded_model_is_introduced(server: Serving, thinking: Serving) -> None:
    """Its answers have a limit, which the page reports; those of other models end where the model ends them."""
    embedded, other = html(server), html(thinking)
    assert 'data-embedded="embedded"' in embedded
    assert "It writes Python, rarely right, and cannot converse." in embedded
    assert 'id="most" type="number" min="1" value="200"' in embedded
    assert "ends after 200 tokens" in embedded
    assert 'data-embedded=""' in other
    assert 'id="most" type="number" min="1" value=""' in other


def test_a_stream_has_what_the_page_shows(thinking: Serving) -> None:
    """Each token of the reasoning, also of its marks; and an earlier answer that has only reasoning is accepted."""
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "", "reasoning_content": "Let me see"},
        {"role": "user", "content": "And 3 + 3?"},
    ]
    options = {"include_usage": True}
    forced = {"structured_outputs": {"choice": ["It is 6."]}, "thinking_token_budget": 9}
    body = {"messages": messages, "stream": True, "stream_options": options, "return_token_ids": True, **forced}
    *chunks, last = thinking.post("/v1/chat/completions", max_tokens=None, **body).events()
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokenized = thinking.post("/tokenize", messages=messages, return_token_strs=True).json()
    assert choices[0]["prompt_token_ids"] == tokenized["tokens"]
    assert len(tokenized["token_strs"]) == last["usage"]["prompt_tokens"]
    assert sum(len(choice.get("token_ids") or ()) for choice in choices) == last["usage"]["completion_tokens"] > 9
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 9
    assert "".join(choice["delta"].get("content", "") for choice in choices).strip() == "It is 6."
    assert "".join(choice["delta"].get("reasoning_content", "") for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"


# ------------------------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


class Chat:
    """An open chat page."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.bodies: list[dict[str, Any]] = []  # of the requests for answers
        self.also: dict[str, Any] = {"ignore_eos": True}  # fields that are added to them, which the page does not set
        self.events: list[Any] = []  # those of an answer in place of the server's
        page.route("**/v1/*completions", self._forward)
        page.route("**/v1/chat/completions", self._forward)

    def _forward(self, route: Any) -> None:
        self.bodies.append(json.loads(route.request.post_data))
        if self.events:
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in self.events)
            route.fulfill(content_type="text/event-stream", body=body)
        else:
            route.continue_(post_data=json.dumps(self.bodies[-1] | self.also))

    def force(self, answer: str, **fields: Any) -> None:
        """Let the model think for a few tokens, and then give this answer."""
        self.also = {"structured_outputs": {"choice": [answer]}, "thinking_token_budget": 20, **fields}

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.ended()

    def ended(self) -> None:
        """Wait until the last answer has ended."""
        self.page.locator("#messages .assistant:last-child .tools").wait_for(timeout=60_000)
        self.page.locator("#send").wait_for()

    def last(self, part: str) -> str:
        return str(self.page.locator(f"#messages .assistant:last-child {part}").inner_text())

    def click(self, name: str, turn: int) -> None:
        self.page.locator("#messages .user" if name == "Edit" else "#messages .assistant").nth(turn).get_by_role(
            "button", name=name
        ).last.click()


@contextmanager
def chat(browser: Any, server: Serving, **options: Any) -> Iterator[Chat]:
    """A page that complains of nothing and talks to nobody else."""
    context = browser.new_context(
        **{"viewport": {"width": 1280, "height": 800}, "permissions": ["clipboard-read", "clipboard-write"]} | options
    )
    page = context.new_page()
    complaints: list[str] = []
    addresses: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda sent: addresses.append(sent.url))
    try:
        page.goto(f"{server.url}/")
        yield Chat(page)
        assert [text for text in complaints if "status of 40" not in text] == []
        assert [address for address in addresses if not address.startswith(server.url)] == []
    finally:
        context.close()


def test_a_turn_of_nothing_but_reasoning_is_shown_and_remembered(browser: Any, thinking: Serving) -> None:
    with chat(browser, thinking) as it:
        it.ask("What is 2+2?")
        assert it.bodies[0]["max_tokens"] is None
        prompt = thinking.post("/tokenize", messages=it.bodies[0]["messages"]).json()["count"]
        longest = thinking.service.model.max_model_len
        new = longest - prompt
        assert re.fullmatch(r"Thought for [\d.]+ m?s, without an end", it.last("summary"))
        reasoning = it.page.evaluate("turns[0].reasoning")
        assert it.last(".thinking div").split() == reasoning.split() != []
        assert it.last(".notice") == (
            f"There is no answer, only reasoning. Cut at {new} tokens, where the longest sequence of this model ends."
        )
        times = r"first one after [\d.]+ m?s · \d+ tokens/s"
        assert re.search(rf"· {new} new, \d+ of them reasoning · {times}$", it.last("small"))
        filled = it.page.locator("#cards .name span").all_inner_texts()
        assert filled == ["16 of 16"] * (longest // 16)
        it.page.evaluate("$('most').value = 24")
        it.ask("Are you sure?")
        assert it.last(".notice").endswith("Cut at 24 tokens, the limit in the settings.")
        assert it.bodies[1]["messages"] == [
            {"role": "user", "content": "What is 2+2?"},
            {"role": "assistant", "content": "", "reasoning_content": reasoning},
            {"role": "user", "content": "Are you sure?"},
        ]


def test_reasoning_is_folded_when_the_answer_begins(browser: Any, thinking: Serving) -> None:
    with chat(browser, thinking) as it:
        it.force("The answer is 4.")
        it.ask("What is 2+2?")
        assert it.last(".answer") == "The answer is 4."
        thought = it.page.locator(".thinking")
        assert thought.get_attribute("open") is None
        assert not thought.locator("div").is_visible()
        assert re.fullmatch(r"Thought for [\d.]+ m?s", it.last("summary"))
        it.page.click(".thinking summary")
        assert thought.locator("div").inner_text()
        assert it.page.locator(".notice").count() == 0
        assert it.last("small").startswith("ended by the model · ")


def test_a_stopped_answer_stays_and_a_refused_one_does_not(browser: Any, thinking: Serving) -> None:
    with chat(browser, thinking) as it:
        it.page.evaluate(STOP_EARLY)
        it.ask("Count.")
        assert re.fullmatch(r"There is no answer, only reasoning\. Stopped after \d+ tokens\.", it.last(".notice"))
        stopped = it.page.evaluate("turns[0].messages()")
        it.also = {"top_p": 7}
        it.ask("What is 2+2?")
        assert it.last(".notice.error").startswith("Top_p is 7")
        assert it.last(".notice").endswith("This turn is not sent with the next one.")
        it.events = [{"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
        it.ask("Say nothing.")
        assert it.last(".notice") == "The answer is empty."
        assert it.bodies[2]["messages"] == [*stopped, {"role": "user", "content": "Say nothing."}]
        it.events = [{"id": "x", "choices": [{"index": 0, "delta": {"content": "So"}, "token_ids": [7]}]}]
        it.ask("Break.")
        assert it.last(".notice.error") == "Failed after 1 token: the connection was lost."
        assert it.last(".answer") == "So"
        it.page.click("#clear")
        assert it.page.locator("#messages li").count() == it.page.locator("#cards li").count() == 0


def test_an_answer_is_markdown_and_nothing_in_it_runs(browser: Any, thinking: Serving) -> None:
    with chat(browser, thinking) as it:
        it.force(HOSTILE)
        it.ask("Attack.")
        assert it.page.evaluate("typeof hacked") == "undefined"
        assert it.page.locator("#messages :is(img, script, iframe, svg, [onclick])").count() == 0
        assert '<img src="http://127.0.0.1:1/b.png" onerror="hacked=2"><script>' in it.last(".answer")
        links = it.page.locator(".answer a").evaluate_all("all => all.map(one => [one.textContent, one.href, one.rel])")
        safe = "noopener noreferrer"
        assert links == [
            ["link", "", safe],
            ["https://example.org/", "https://example.org/", safe],
            ["a picture", "http://127.0.0.1:1/a.png", safe],
        ]
        cleaned = it.page.evaluate("html => make('div', {}, DOMPurify.sanitize(html, CLEAN)).innerHTML", UNSAFE)
        assert cleaned == "<a>a</a>bsend<p>c</p>"  # also where the first guard, which shows HTML as text, would fail
        it.force(MARKDOWN)
        it.ask("How do I read a JSON file?")
        assert it.last(".answer strong") == "so"
        assert it.last(".answer pre").startswith('with open("a file')
        assert it.last(".answer .bar span") == "python"
        for theme in ("light", "dark"):
            it.page.emulate_media(color_scheme=theme)
            for width, height in ((1280, 800), (390, 844)):
                it.page.set_viewport_size({"width": width, "height": height})
                assert it.page.evaluate(FAULTS) == []


def test_answers_are_copied_edited_and_regenerated(browser: Any, thinking: Serving) -> None:
    with chat(browser, thinking) as it:
        code = MARKDOWN.split("```")[1].removeprefix("python\n")
        it.force(MARKDOWN)
        it.ask("How do I read a JSON file?")
        it.page.click(".bar button")
        it.page.locator(".bar button", has_text="Copied").wait_for()
        assert it.page.evaluate("navigator.clipboard.readText()") == code
        it.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain http
        it.click("Copy", 0)
        it.page.focus("#prompt")
        it.page.keyboard.press("Control+V")
        assert it.page.input_value("#prompt") == MARKDOWN.strip()

        it.ask("And write it?")
        it.force("Another answer.")
        it.click("Regenerate", 1)
        it.ended()
        assert it.bodies[2] == it.bodies[1]
        assert it.last(".answer") == "Another answer."
        assert it.page.locator("#messages .assistant").count() == 2

        it.click("Edit", 0)
        it.page.keyboard.press("Escape")
        assert it.page.locator("#messages .user > span").first.inner_text() == "How do I read a JSON file?"
        it.click("Edit", 0)
        it.page.get_by_label("Edited message").fill("How do I read a TOML file?")
        it.page.get_by_label("Edited message").press("Enter")
        it.ended()
        assert it.bodies[3]["messages"] == [{"role": "user", "content": "How do I read a TOML file?"}]
        assert it.page.locator("#messages li").all_inner_texts()[0].startswith("How do I read a TOML file?")
        assert it.page.locator("#messages .assistant").count() == 1


def test_a_model_or_an_adapter_is_chosen(browser: Any, server: Serving, thinking: Serving) -> None:
    with chat(browser, thinking) as it:
        it.page.locator("#model").wait_for()
        assert it.page.locator("#model option").all_inner_texts() == ["thinker", "sql (adapter of thinker)"]
        it.page.select_option("#model", "sql")
        it.force("Yes.")
        it.ask("Is it you?")
        assert it.bodies[0]["model"] == "sql"
        assert thinking.service.answering("sql") == "sql"
    with chat(browser, server) as it:
        it.page.get_by_role("button", name="def read_json(path):").click()
        it.page.press("#prompt", "Enter")
        it.ended()
        assert it.bodies[0] | {"model": "quire-embedded", "max_tokens": 200} == it.bodies[0]
        assert it.page.locator("#name").inner_text() == "quire-embedded"
        assert not it.page.locator("#model").is_visible()
        assert it.last(".answer .bar span") == "python"  # its answers are code without a fence
        it.page.evaluate("$('most').value = 8")
        for _ in range(2):  # of 400 tokens each: two of them and the first turn do not fit into 1,024
            it.ask("x = 1; " * 80)
        assert len(it.bodies[2]["messages"]) == 3
        assert it.last(".notice") == (
            "Cut at 8 tokens, the limit in the settings. Without the first turn, for which the model has no room."
        )


def test_a_model_without_a_template_continues_texts(browser: Any, tmp_path: Path) -> None:
    """Each text alone, as plain text."""
    for path in EMBEDDED.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    with serving({"model": str(tmp_path)}) as server, chat(browser, server) as it:
        for text in ("# A *list*\n", "class Stack:\n"):
            it.page.fill("#prompt", text)
            it.page.press("#prompt", "Control+Enter")
            it.ended()
        assert [(body["prompt"], body["max_tokens"]) for body in it.bodies] == [("# A *list*\n", 200), (text, 200)]
        assert it.page.evaluate("turns[1].count") == 200
        assert it.last(".answer.plain").rstrip() == it.page.evaluate("turns[1].content").rstrip()
        assert it.page.locator(".answer.plain *").count() == 0


def test_a_key_of_the_settings_replaces_the_password_of_the_page(browser: Any) -> None:
    credentials = {"username": "any", "password": "first"}
    with serving(api_key=("first", "second")) as server, chat(browser, server, http_credentials=credentials) as it:
        it.page.click("#settings")
        for key, is_known in (("wrong", False), ("second", True)):
            it.page.fill("#key", "")
            it.page.locator("#key").press_sequentially(key)
            with it.page.expect_response(f"{server.url}/v1/models") as listed:
                it.page.press("#key", "Tab")
            assert listed.value.request.headers["authorization"] == f"Bearer {key}"
            assert listed.value.ok == is_known
        it.ask("def read_json(path):")
        assert it.last(".answer pre")
        it.page.fill("#key", "wrong")
        it.ask("class Stack:")
        assert "Enter the API key in the settings above." in it.last(".notice.error")


# ------------------------------------------------------------------------------------------------------------ images

SEEING = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}" \
         "{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}{% endfor %}"  # fmt: skip
# Gives the page files as a user does who pastes or drops them.
GIVE = """([id, kind, type, base64, text]) => {
  const data = new DataTransfer(), bytes = Uint8Array.from(atob(base64), one => one.charCodeAt(0));
  data.items.add(new File([bytes], "a file", { type }));
  if (text) data.setData("text/plain", text);
  const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  return $(id).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model that reads images."""
    directory = tmp_path_factory.mktemp("seeing")
    save_images_model(directory, "smolvlm")
    (directory / "seeing.jinja").write_text(SEEING)
    options = {"model": str(directory), "dtype": "float32", "max_model_len": 1024}
    with serving(options, chat_template=directory / "seeing.jinja", served_model_name=("seer",)) as running:
        yield running


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


MANY = png(Image.new("1", (8192, 2**11 + 1)))


def test_images_are_chosen_pasted_dropped_and_removed(browser: Any, seeing: Serving) -> None:
    one, two, three = (png(image) for image in pictures(3))
    large = png(Image.effect_noise((2560, 400), 90))
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (one, two, three)]
    with chat(browser, seeing) as it:
        it.also = {"ignore_eos": True, "max_tokens": 4}
        files = [{"name": f"{i}.png", "mimeType": "image/png", "buffer": data} for i, data in enumerate((one, two))]
        shown = it.page.locator("#images img")
        it.page.set_input_files("#files", [*files, {"name": "a.svg", "mimeType": "image/svg+xml", "buffer": b"<svg/>"}])
        shown.nth(1).wait_for()
        assert it.page.locator("#refused").inner_text().startswith("a.svg: an image is a PNG, JPEG")
        it.page.get_by_label("Remove 0.png").click()
        it.page.evaluate(GIVE, ["prompt", "paste", "image/png", base64.b64encode(three).decode()])
        shown.nth(1).wait_for()
        it.page.evaluate(GIVE, ["prompt", "paste", "image/png", base64.b64encode(b"no image").decode()])
        it.page.locator("#refused:has-text('a file')").wait_for()
        both = ["prompt", "paste", "image/png", base64.b64encode(one).decode(), "a table and its picture"]
        assert it.page.evaluate(GIVE, both), "the browser pastes the text"
        assert shown.evaluate_all("all => all.map(one => one.src)") == urls[1:]
        it.ask("What is it?")
        question = [{"type": "image_url", "image_url": {"url": url}} for url in urls[1:]]
        assert it.bodies[0]["messages"] == [
            {"role": "user", "content": [*question, {"type": "text", "text": "What is it?"}]}
        ]
        assert (it.page.evaluate("turns[0].end"), shown.count()) == ("length", 0)
        assert it.page.locator(".user .pictures img").count() == 2

        it.page.evaluate(GIVE, ["talk", "dragover", "image/png", ""])
        it.page.locator("#talk.dropping").wait_for()
        it.page.evaluate(GIVE, ["talk", "drop", "image/png", base64.b64encode(large).decode()])
        shown.first.wait_for()
        assert it.page.locator("#talk.dropping").count() == 0
        for theme in ("light", "dark"):
            it.page.emulate_media(color_scheme=theme)
            for width, height in ((1280, 800), (390, 844)):
                it.page.set_viewport_size({"width": width, "height": height})
                assert it.page.evaluate(FAULTS) == []
        it.ask("")  # an image alone
        first, _, last = it.bodies[1]["messages"]
        assert first == it.bodies[0]["messages"][0]
        [sent] = last["content"]
        head, data = sent["image_url"]["url"].split(",")
        assert head == "data:image/jpeg;base64"
        assert Image.open(BytesIO(base64.b64decode(data))).size == (2048, 320)
        it.click("Regenerate", 1)
        it.ended()
        assert it.bodies[2] == it.bodies[1]
        # A small file of many pixels, more than a server decodes.
        it.page.evaluate(GIVE, ["prompt", "paste", "image/png", base64.b64encode(MANY).decode()])
        shown.first.wait_for()
        assert shown.evaluate_all("all => all.map(one => one.naturalWidth)") == [2048]
        # A message is not sent before its images are read.
        it.page.fill("#prompt", "And this?")
        give = f"({GIVE})({json.dumps(['prompt', 'paste', 'image/png', base64.b64encode(two).decode()])})"
        it.page.evaluate(f"() => {{ {give}; $('ask').requestSubmit(); }}")
        shown.nth(1).wait_for()
        assert (len(it.bodies), it.page.input_value("#prompt")) == (3, "And this?")
        it.page.click("#clear")
        assert shown.count() == 0


def test_a_model_of_text_is_given_no_images(browser: Any, server: Serving) -> None:
    with chat(browser, server) as it:
        assert not it.page.locator("#choose").is_visible()
        it.page.evaluate(GIVE, ["prompt", "paste", "image/png", base64.b64encode(png(pictures(1)[0])).decode()])
        it.page.evaluate(GIVE, ["talk", "drop", "image/png", ""])
        it.page.evaluate("new Promise(done => setTimeout(done))")
        assert it.page.evaluate("images") == []
