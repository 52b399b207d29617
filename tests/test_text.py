"""Detokenizing as tokens come, and stop strings."""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire.errors import ModelError, RequestError
from quire.frontend.output_processor import OutputProcessor, _certain
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.tokenizer import Detokenizer, Tokenizer, find_tokenizer
from quire.models import EMBEDDED
from quire.request import Event, FinishReason, Request, SamplingParams, TokenLogprobs

TEXTS = ["plain text, two  spaces", "žluťoučký kůň", "漢字と仮名", "🙂🙃 👩‍👩‍👧‍👦 e\u0301", "a\ufffdb", "\n\t x", ""]


def byte_level() -> FastTokenizer:
    """One token a byte: every character above ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def test_texts_in_a_form_have_no_added_tokens() -> None:
    """Nor has what a text and the form make together; where there is none, the tokens are those of the whole."""
    tokenizer = Tokenizer(EMBEDDED)
    end = "<|endoftext|>"
    assert end in tokenizer.added_tokens
    for form, texts, num_ends in (
        (["# ", ": ", "\n"], ["class A", " a = 1"], 0),
        ([end, " and ", end], ["one", "another"], 2),
        ([end, "x", end], [f"a{end}b{end}{end}", f"{end}"], 2),
        (["<|endof", "<|", "ext|>"], ["text|>", "endoft"], 0),
        (["a"], [], 0),
    ):
        whole = form[0] + "".join(text + after for text, after in zip(texts, form[1:], strict=True))
        tokens = tokenizer.encode_form(form, texts)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == whole
        assert tokens.count(tokenizer.added_tokens[end]) == num_ends
        if whole.count(end) == num_ends:
            assert tokens == tokenizer.encode(whole, add_special_tokens=False)


def byte_fallback() -> FastTokenizer:
    """As sentencepiece has it: words with a leading mark, bytes for all else, a leading space that is dropped."""
    vocab = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    for piece in ["▁", "a", "b", "x", "▁a", "▁text", "plain", "two"]:
        vocab[piece] = len(vocab)
    fast = FastTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast


@pytest.fixture(params=[byte_level, byte_fallback], ids=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    request.param().save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "a", "漢"])
def test_pieces_make_up_the_text_and_no_character_is_split(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    context = tokenizer.encode(prompt) if prompt else []
    tokens = tokenizer.encode(prompt + text)[len(context) :]
    detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=True)
    pieces = [detokenizer.add(token) for token in tokens] + [detokenizer.finish()]
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_broken_bytes_come_out_in_the_end_and_do_not_pile_up(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    broken = tokenizer.encode("é")[0]
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    pieces = [detokenizer.add(broken) for _ in range(100)]
    assert len("".join(pieces)) >= 80
    assert len(detokenizer._window) <= 32
    assert "".join(pieces) + detokenizer.finish() == "\ufffd" * 100


def test_a_prompt_cut_within_a_character_is_completed(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a漢b")
    at = next(i for i in range(len(tokens)) if "\ufffd" in tokenizer.decode(tokens[:i]))
    detokenizer = Detokenizer(tokenizer, tokens[:at], skip_special_tokens=True)
    assert "".join([detokenizer.add(token) for token in tokens[at:]]) == "漢b"


def random_text(random: Random, length: int) -> str:
    ranges = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0x2580), (0x2590, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
    return "".join(chr(random.randint(*random.choice(ranges))) for _ in range(length))


class TestTokenizer:
    def test_the_bytes_of_tokens_make_up_the_text(self, tokenizer: Tokenizer) -> None:
        leading = tokenizer.token_bytes(tokenizer.encode("x")[0]).removesuffix(b"x")  # sentencepiece adds a space
        for tested, before in ((tokenizer, leading), (Tokenizer(EMBEDDED), b"")):
            random = Random(20)
            for text in (*TEXTS, *(random_text(random, random.randrange(40)) for _ in range(500))):
                tokens = tested.encode(text, add_special_tokens=False)
                shown = b"".join(tested.token_bytes(token) for token in tokens)
                assert shown == (before + text.encode() if text else b"")

    def test_the_bytes_of_every_token_are_its_text(self) -> None:
        tokenizer = Tokenizer(EMBEDDED)
        assert tokenizer.vocab_size == 2048
        for token in range(tokenizer.vocab_size):
            text = tokenizer.decode([token], skip_special_tokens=False)
            assert tokenizer.token_bytes(token).decode(errors="replace") == text
        assert tokenizer.token_bytes(0) == b"<|endoftext|>"
        assert tokenizer.token_bytes(5000) == b""  # a model's vocabulary may be longer

    def test_added_tokens_are_their_text(self, tmp_path: Path) -> None:
        fast = byte_fallback()
        fast.add_special_tokens(["<|a\u2581b|>"])
        fast.add_tokens(["<|c|>"])
        fast.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer(tmp_path)
        tokens = tokenizer.encode("<|a\u2581b|><|c|>")
        assert [tokenizer.token_bytes(token) for token in tokens] == ["<|a\u2581b|>".encode(), b"<|c|>"]
        assert tokenizer.vocab_size == fast.get_vocab_size()

    def test_words_of_other_tokenizers(self, tmp_path: Path) -> None:
        fast = FastTokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
        fast.decoder = decoders.WordPiece()
        fast.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer(tmp_path)
        assert tokenizer.token_bytes(1) == b"play"

    def test_special_tokens_are_added_if_asked_for(self) -> None:
        tokenizer = Tokenizer(EMBEDDED)
        tokens = tokenizer.encode("def f():", add_special_tokens=False)
        assert tokenizer.encode("def f():") == [0, *tokens]
        assert tokenizer.encode("<|endoftext|>def f():", add_special_tokens=False) == [0, *tokens]

    @pytest.mark.parametrize(
        ("text", "told"), [("ab\ud83d", r"U\+D83D.* position 2"), ("\udc00", r"U\+DC00.* position 0")]
    )
    def test_half_a_character_is_refused(self, tokenizer: Tokenizer, text: str, told: str) -> None:
        with pytest.raises(RequestError, match=told):
            tokenizer.encode(text)

    def test_what_the_vocabulary_lacks_is_refused(self, tmp_path: Path) -> None:
        FastTokenizer(models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(RequestError, match="the text cannot be encoded: "):
            Tokenizer(tmp_path).encode("b")

    def test_its_contents_make_the_same_tokenizer(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(tokenizer.json())
        again = Tokenizer(tmp_path)
        assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)

    def test_many_threads_may_use_it(self) -> None:
        tokenizer, random = Tokenizer(EMBEDDED), Random(21)
        texts = [random_text(random, 300) + "def f(x):\n    return x\n" * i for i in range(20)]
        expected = [tokenizer.encode(text) for text in texts]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(tokenizer.encode, texts * 10)) == expected * 10
            assert list(pool.map(tokenizer.decode, expected * 10)) == texts * 10


def test_no_tokenizer_and_a_broken_one(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        find_tokenizer(tmp_path)


class FakeEngine:
    """Takes note of the requests that a stop string ended."""

    weights_version = "0"

    def __init__(self) -> None:
        self.ended: list[str] = []

    def add(self, request: Request) -> None:
        pass

    def finish(self, request_id: str, reason: FinishReason) -> None:
        assert reason is FinishReason.STOP
        self.ended.append(request_id)


def told(
    tokenizer: Tokenizer, text: str, reason: FinishReason, **sampling: object
) -> tuple[CompletionOutput, list[str], FakeEngine]:
    """Feed the text's tokens one by one: the output, what a caller saw after each, and the engine."""
    engine = FakeEngine()
    processor = OutputProcessor(engine, tokenizer)  # type: ignore[arg-type]
    output = RequestOutput("p", None, [], [CompletionOutput(0)])
    processor.add(Request("r", array("i"), 0, SamplingParams(max_tokens=None, **sampling)), output, deque())
    tokens, seen = tokenizer.encode(text), []
    for i, token in enumerate(tokens):
        events = [Event("r", token, finish_reason=reason if i == len(tokens) - 1 else None)]
        seen += [found.outputs[0].text for _, found in processor.process(events)]
    return output.outputs[0], seen, engine


@pytest.fixture
def bytewise(tmp_path: Path) -> Tokenizer:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def test_a_stop_string_ends_the_text_before_it(bytewise: Tokenizer) -> None:
    output, seen, engine = told(bytewise, "one two END three", FinishReason.LENGTH, stop=["xx", "END"])
    assert (output.text, output.finish_reason, output.stop_reason) == ("one two ", "stop", "END")
    assert engine.ended == ["r"]
    assert len(seen) == len("one two END")  # later events are not for us any more
    assert all("one two ".startswith(text) for text in seen)  # nothing of it was ever shown


def test_what_came_after_a_stop_string_in_the_same_step_is_left_out(bytewise: Tokenizer) -> None:
    engine = FakeEngine()
    processor = OutputProcessor(engine, bytewise)  # type: ignore[arg-type]
    output = RequestOutput("p", None, [], [CompletionOutput(0)])
    params = SamplingParams(max_tokens=6, stop="c", logprobs=0)
    processor.add(Request("r", array("i"), 0, params), output, deque())
    step = [Event("r", token, TokenLogprobs(token, -1.0, 1, ())) for token in bytewise.encode("abcdef")]
    step[-1] = step[-1]._replace(finish_reason=FinishReason.LENGTH)
    taken = list(processor.process([*step[:4], Event("stranger", 1), *step[4:]]))
    assert taken == [(event, output) for event in (*step[:2], step[2]._replace(finish_reason=FinishReason.STOP))]
    [sample] = output.outputs
    assert (sample.text, sample.token_ids, len(sample.logprobs or [])) == ("ab", bytewise.encode("abc"), 3)
    assert (sample.finish_reason, sample.stop_reason, sample.cumulative_logprob) == ("stop", "c", -3.0)
    assert engine.ended == ["r"]
    assert not list(processor.process([Event("r", finish_reason=FinishReason.STOP)]))


def test_a_tokenizer_that_fails_ends_the_sample_with_that_event(bytewise: Tokenizer) -> None:
    class Ending(FakeEngine):
        def finish(self, request_id: str, reason: FinishReason) -> None:
            self.ended.append(f"{request_id}: {reason.value}")

    engine = Ending()
    processor = OutputProcessor(engine, bytewise)  # type: ignore[arg-type]
    output = RequestOutput("p", None, [], [CompletionOutput(0)])
    processor.add(Request("r", array("i"), 0, SamplingParams(max_tokens=6)), output, deque())
    step = [Event("r", 5), Event("r", -3), Event("r", 6)]  # no tokenizer has a negative id
    [first, (event, _)] = processor.process(step)
    assert first == (step[0], output)
    assert (event.token, event.finish_reason, event.error) == (-3, FinishReason.ERROR, output.outputs[0].error)
    assert event.error
    assert engine.ended == ["r: error"]


def test_a_stop_string_may_be_kept(bytewise: Tokenizer) -> None:
    output, _, _ = told(bytewise, "abcENDx", FinishReason.LENGTH, stop="END", include_stop_str_in_output=True)
    assert output.text == "abcEND"


def test_what_only_looks_like_a_stop_string_is_shown_after_all(bytewise: Tokenizer) -> None:
    output, seen, _ = told(bytewise, "aEN b EEND", FinishReason.LENGTH, stop="END!")
    assert output.text == "aEN b EEND"
    assert seen[:5] == ["a", "a", "a", "aEN ", "aEN b"]
    assert output.finish_reason == "length"


def test_the_earliest_of_several_stop_strings_counts(bytewise: Tokenizer) -> None:
    output, _, _ = told(bytewise, "abcd", FinishReason.LENGTH, stop=["cd", "bc"])
    assert (output.text, output.stop_reason) == ("a", "bc")


def test_no_stop_string_before_min_tokens(bytewise: Tokenizer) -> None:
    output, _, _ = told(bytewise, "x.y.z.", FinishReason.LENGTH, stop=".", min_tokens=3)
    assert output.text == "x.y"


def test_a_stop_string_in_the_last_token_counts(bytewise: Tokenizer) -> None:
    output, _, _ = told(bytewise, "ab.", FinishReason.LENGTH, stop=".")
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_a_stop_tokens_text_is_left_out(bytewise: Tokenizer) -> None:
    assert told(bytewise, "ab.", FinishReason.STOP)[0].text == "ab"
    assert told(bytewise, "ab.", FinishReason.STOP, include_stop_str_in_output=True)[0].text == "ab."


def test_random_stop_strings_agree_with_a_plain_search(bytewise: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 15)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        output, seen, _ = told(bytewise, text, FinishReason.LENGTH, stop=stops)
        ends = (
            [min(text.find(stop) + len(stop) for stop in stops if stop in text)]
            if any(s in text for s in stops)
            else []
        )
        first = min((text.find(s) for s in stops if s in text and text.find(s) + len(s) == ends[0]), default=None)
        assert output.text == (text if first is None else text[:first])
        assert all(output.text.startswith(shown) for shown in seen)


def test_what_is_certain_agrees_with_its_definition() -> None:
    """Also where a whole stop string was passed over, as within min_tokens."""
    rng = random.Random(1)
    for _ in range(3000):
        letters = rng.choice(["a", "ab", "abc"])
        stops = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(rng.randint(0, 4))]
        text, certain = "", 0
        for _ in range(6):
            text += "".join(rng.choices(letters, k=rng.randint(0, 4)))
            certain = _certain(text, certain, stops)
            begun = (n for n in range(len(text), 0, -1) if any(text.endswith(s[:n]) for s in stops if n < len(s)))
            assert certain == len(text) - next(begun, 0), (text, stops)


def test_where_no_stop_string_begins_is_looked_at_once() -> None:
    class Stop(str):
        def startswith(self, end: str) -> bool:  # type: ignore[override]
            looked.append(len(text) - len(end))
            return super().startswith(end)

    looked: list[int] = []
    stops = [Stop("a" * 200 + "b" * 55), Stop("ab" * 100)]
    text, certain = "", 0
    for i in range(400):
        text += "a" if i % 150 else "c"
        certain = _certain(text, certain, stops)
    assert len(looked) < 4 * len(text)


def test_random_prompts_and_texts(tokenizer: Tokenizer) -> None:
    """Characters of one to four bytes; the context is cut anywhere, also within a run of bytes."""
    rng = random.Random(0)
    for _ in range(60):
        prompt, text = ("".join(rng.choice("ab é漢字🙂") for _ in range(rng.randint(1, 30))) for _ in range(2))
        prompt, text = "a" + prompt, text + "b"
        context = tokenizer.encode(prompt)
        tokens = tokenizer.encode(prompt + text)[len(context) :]
        detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=True)
        assert "".join([*(detokenizer.add(token) for token in tokens), detokenizer.finish()]) == text


def test_a_character_after_many_broken_bytes_is_whole(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    broken = tokenizer.encode("é")[0]
    for count in range(1, 40):
        tokens = [broken] * count + tokenizer.encode("漢字 hello")
        detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
        pieces = [detokenizer.add(token) for token in tokens]
        assert "".join(pieces) + detokenizer.finish() == "\ufffd" * count + "漢字 hello"


def test_a_tokenizer_that_was_saved_to_cut_and_pad_does_neither(tmp_path: Path) -> None:
    fast = byte_level()
    fast.enable_truncation(4)
    fast.enable_padding(length=12)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("hi")) == 2
    assert len(Tokenizer(tmp_path).encode("hello world")) == 11


def test_a_short_stop_string_within_min_tokens_does_not_end_a_longer_ones_wait(bytewise: Tokenizer) -> None:
    output, seen, _ = told(bytewise, "x.yz.", FinishReason.LENGTH, stop=[".", "END!!"], min_tokens=2)
    assert output.text == "x.yz"
    assert seen == sorted(seen, key=len)


def test_a_candidates_text_is_decoded_once(bytewise: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[list[int]] = []
    real = bytewise.decode

    def decode(tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            decoded.append(list(tokens))
        return real(tokens, skip_special_tokens)

    monkeypatch.setattr(bytewise, "decode", decode)
    processor = OutputProcessor(FakeEngine(), bytewise)  # type: ignore[arg-type]
    output = RequestOutput("p", None, [], [CompletionOutput(0), CompletionOutput(1)])
    for i in range(2):
        params = SamplingParams(max_tokens=None, logprobs=2)
        processor.add(Request(f"{i}", array("i"), 0, params, i), output, deque())
    [a, b, half] = bytewise.encode("ab") + bytewise.encode("é")[:1]
    for token in (a, b, a, half):
        logprobs = TokenLogprobs(token, -1.0, 3, ((b, -0.1), (half, -0.2)))
        list(processor.process([Event(f"{i}", token, logprobs) for i in range(2)]))
    assert sorted(decoded) == sorted([[a], [b], [half]])
    for sample in output.outputs:
        texts = [{token: one.decoded_token for token, one in position.items()} for position in sample.logprobs or []]
        common = {b: "b", half: "\ufffd"}
        assert texts == [common | {a: "a"}, common, common | {a: "a"}, common]


# ------------------------------------------------------------------------------- the prompt's text is the prompt's


def broken_cases(seed: int, count: int) -> Iterator[tuple[list[int], list[int], str, str, bool]]:
    """Prompts and new tokens of the embedded model, most of them no whole characters, and what the new ones add.

    What bytes are as a text is Python's to say. A prompt that ends within a character may see it completed.
    """
    tokenizer, rng = Tokenizer(EMBEDDED), random.Random(seed)
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    broken = [token for token, piece in enumerate(pieces) if "\ufffd" in piece.decode(errors="replace")]

    def text(tokens: list[int], skips: bool) -> str:
        return b"".join(pieces[t] for t in tokens if t or not skips).decode(errors="replace")  # 0: <|endoftext|>

    def some(count: int) -> list[int]:
        whole = rng.randrange(len(pieces)), 0
        return [rng.choice(rng.choice((broken, broken, whole))) for _ in range(count)]

    for _ in range(count):
        character = tokenizer.encode(rng.choice("漢🙂é\ufffd"), add_special_tokens=False) * (rng.random() < 0.5)
        cut = rng.randint(0, len(character))
        prompt = some(rng.choice((*range(9), 15, 16, 17, 30))) + character[:cut]
        new = character[cut:] + some(rng.randint(0, 8))
        skips = rng.random() < 0.5
        before, after = text(prompt, skips), text(prompt + new, skips)
        common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        yield prompt, new, before, after[common:], skips


@pytest.mark.slow
def test_the_text_is_what_the_tokens_add_to_the_prompts() -> None:
    tokenizer = Tokenizer(EMBEDDED)
    for prompt, new, _, added, skips in broken_cases(0, 3000):
        detokenizer = Detokenizer(tokenizer, prompt, skips)
        found = "".join([*(detokenizer.add(token) for token in new), detokenizer.finish()])
        assert found == added, (prompt, new, skips)
        assert Detokenizer(tokenizer, prompt, skips).finish(new) == added, (prompt, new, skips)


@pytest.mark.parametrize("fast", [byte_level, byte_fallback])
def test_the_last_tokens_may_come_at_once(fast: Callable[[], FastTokenizer], tmp_path: Path) -> None:
    fast().save(str(tmp_path / "tokenizer.json"))
    tokenizer, rng = Tokenizer(tmp_path), random.Random(3)
    for _ in range(200):
        tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.choice((0, 0, 1, 40)))]
        tokens += tokenizer.encode(rng.choice(TEXTS) + rng.choice(TEXTS), add_special_tokens=False)
        cut = rng.randint(0, len(tokens))
        one, other = (Detokenizer(tokenizer, [], skip_special_tokens=True) for _ in range(2))
        found = "".join(map(one.add, tokens[:cut])) + one.finish(tokens[cut:])
        assert found == "".join(map(other.add, tokens)) + other.finish(), tokens
        whole = tokenizer.decode(tokens)
        assert found == whole or "\ufffd" in whole, tokens


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_stop_strings_are_not_looked_for_in_the_prompt(keeps: bool) -> None:
    tokenizer, rng, num_stopped = Tokenizer(EMBEDDED), random.Random(1), 0
    for prompt, new, before, added, skips in broken_cases(2, 1500):
        if not new or not before:
            continue
        at = rng.randrange(len(before))
        stops = [before[at : at + rng.randint(1, 3)], rng.choice(added) if added and rng.random() < 0.3 else "never"]
        params = SamplingParams(
            max_tokens=None, stop=stops, include_stop_str_in_output=keeps, skip_special_tokens=skips
        )
        engine = FakeEngine()
        processor = OutputProcessor(engine, tokenizer)  # type: ignore[arg-type]
        output = RequestOutput("p", None, prompt, [CompletionOutput(0)])
        processor.add(Request("r", array("i", prompt), len(prompt), params), output, deque())
        for i, token in enumerate(new):
            reason = FinishReason.LENGTH if i == len(new) - 1 else None
            list(processor.process([Event("r", token, finish_reason=reason)]))
        [sample] = output.outputs
        if not any(stop in added for stop in stops):
            assert (sample.text, sample.finish_reason) == (added, "length"), (prompt, new, stops)
            continue
        num_stopped += 1
        assert sample.finish_reason == "stop"
        kept = sample.stop_reason if keeps else ""
        assert added.startswith(f"{sample.text.removesuffix(kept)}{sample.stop_reason}"), (prompt, new, stops)
    assert num_stopped > 50


def test_a_prompt_that_begins_with_a_broken_character_is_not_repeated() -> None:
    tokenizer = Tokenizer(EMBEDDED)
    [half] = (t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == b"\xe6")
    word, other = (tokenizer.encode(text, add_special_tokens=False) for text in ("self", " other"))
    for prompt in ([half, *word], [0, half, *word], [half], [0, half, 0], tokenizer.encode("\ufffd")):
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
        assert "".join([*(detokenizer.add(token) for token in other), detokenizer.finish()]) == " other"


class NotWalked(list[int]):
    """A prompt of which parts may be taken, but which nobody may go through."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("someone goes through the whole prompt")

    __reversed__ = __iter__


def test_a_long_prompt_is_not_gone_through() -> None:
    """Not even one that is all special tokens: each sample has a detokenizer."""
    tokenizer = Tokenizer(EMBEDDED)
    prompt = NotWalked([next(iter(tokenizer.special_tokens))] * 5_000)
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    text = "".join(detokenizer.add(token) for token in tokenizer.encode("return"))
    assert text + detokenizer.finish() == "return"


# ------------------------------------------------------------------------------------------------------- resumed


@pytest.mark.parametrize("seed", range(8))
def test_a_resumed_text_is_where_it_was_and_goes_on_the_same(tokenizer: Tokenizer, seed: int) -> None:
    """Cut within characters, within what may be a stop string, and within min_tokens."""
    rng = random.Random(seed)
    prompt = "a" + "".join(rng.choices("ab 漢🙂", k=5))
    text = "".join(rng.choices("ab é漢字🙂", k=12))
    stops = ["".join(rng.choices("ab é漢字🙂", k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))]
    context = tokenizer.encode(prompt)
    tokens = tokenizer.encode(prompt + text)[len(context) :]
    sampling = SamplingParams(max_tokens=None, stop=stops or None, min_tokens=rng.choice((0, 0, 7)))

    def go_on(delivered: int, num_checked: int) -> tuple[CompletionOutput, list[str]]:
        """The output after all other tokens, and its text before and after each of them."""
        request = Request("r", array("i", context), len(context), sampling)
        if delivered:
            request.resume(tokens[:delivered], num_checked)
        output = RequestOutput("p", None, context, [CompletionOutput(0)])
        processor = OutputProcessor(FakeEngine(), tokenizer)  # type: ignore[arg-type]
        processor.add(request, output, deque())
        seen = [output.outputs[0].text]
        for i, token in enumerate(tokens):
            if output.outputs[0].finished or i < delivered - num_checked:
                continue
            known = i < delivered  # it is drawn again
            end = FinishReason.LENGTH if i == len(tokens) - 1 else None
            list(processor.process([Event("r", token, finish_reason=end, drawn=token if known else None)]))
            if not known:
                seen.append(output.outputs[0].text)
        return output.outputs[0], seen

    whole, seen = go_on(0, 0)
    for cut in range(1, len(whole.token_ids)):
        for num_checked in (0, min(cut, 4)):
            found, shown = go_on(cut, num_checked)
            assert shown == seen[cut:], (cut, num_checked)
            assert (found.token_ids, found.text) == (whole.token_ids, whole.text)
            assert (found.finish_reason, found.stop_reason) == (whole.finish_reason, whole.stop_reason)
            assert found.num_differences == 0


def test_a_delivered_token_that_is_drawn_otherwise_is_counted_and_kept(bytewise: Tokenizer) -> None:
    tokens = bytewise.encode("abc")
    request = Request("r", array("i"), 0, SamplingParams(max_tokens=None))
    request.resume(tokens[:2], 2)
    output = RequestOutput("p", None, [], [CompletionOutput(0)])
    processor = OutputProcessor(FakeEngine(), bytewise)  # type: ignore[arg-type]
    processor.add(request, output, deque())
    events = [Event("r", tokens[0], drawn=tokens[0]), Event("r", tokens[1], drawn=tokens[2]), Event("r", tokens[2])]
    list(processor.process(events))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("abc", tokens)
    assert output.outputs[0].num_differences == 1
