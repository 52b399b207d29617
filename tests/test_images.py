"""Images in prompts: the model's numbers, the bits, the prefix cache, and what is refused."""

from __future__ import annotations

import shutil
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.frontend.images import PromptImages
from quire.models.images import EncodedImage
from quire.request import Miss
from quire.sandbox.images import MAX_PIXELS, ImageDecoder
from tests.models.image_checkpoints import FAMILIES, pictures, save_images_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smolvlm")
    save_images_model(directory, "smolvlm")
    return directory


@pytest.fixture(scope="module")
def llm(smolvlm: Path) -> Iterator[LLM]:
    with LLM(str(smolvlm), num_blocks=200, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("kind", [*FAMILIES])
def test_numbers_are_those_of_transformers_with_the_same_bits_in_every_batch(tmp_path: Path, kind: str) -> None:
    mark = save_images_model(tmp_path, kind)
    one, two, three = pictures(3)
    texts = [f"def f {mark} and {mark} world, and many words more after them", f"{mark} import os", "class A:"]
    prompts = [{"prompt": text} for text in texts]
    images = [[one, two], [three], []]
    for prompt, own in zip(prompts, images, strict=True):
        if own:
            prompt["multi_modal_data"] = {"image": own}  # type: ignore[assignment]
    with LLM(str(tmp_path), num_blocks=400, **OPTIONS) as llm:
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompts[0], GREEDY, use_tqdm=False)
        processor = llm.factory.images._encoder.processor  # type: ignore[union-attr]
    report = again[0].prefix_report
    assert report is not None
    assert (report.num_cached > 0 and report.miss is None) or report.miss is Miss.SHORT
    budget = {"gemma3": 20, "gemma4": 80}.get(kind, 16)  # for the rows of an image that see one another, and 3 others
    chunks = {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with LLM(str(tmp_path), num_blocks=24, **chunks, **OPTIONS) as small:  # and preemption
            others = small.generate(prompts, GREEDY, use_tqdm=False)
    finally:
        torch.set_num_threads(threads)
    for output, other in zip([*found, found[0]], [*others, *again], strict=True):
        assert other.outputs[0].token_ids == output.outputs[0].token_ids
        assert other.outputs[0].logprobs == output.outputs[0].logprobs
    whole = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for text, own, output in zip(texts[:2], images, found, strict=False):
        given = processor(text=[text], images=[own], return_tensors="pt", add_special_tokens=False)
        assert given["input_ids"][0].tolist() == output.prompt_token_ids
        _check_logprobs(whole, dict(given), output)


def _check_logprobs(whole: Any, given: dict[str, Any], output: Any) -> None:
    """Compare the log-probabilities of generated tokens with those of transformers' model."""
    tokens = output.outputs[0].token_ids
    given["input_ids"] = torch.cat([given["input_ids"], torch.tensor([tokens])], 1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "mm_token_type_ids" in given:
        kinds = torch.as_tensor(given["mm_token_type_ids"])
        given["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, len(tokens))], 1)
    with torch.inference_mode():
        expected = whole(**given).logits[0].log_softmax(-1)
    first = len(output.prompt_token_ids) - 1
    ours = [found[token].logprob for token, found in zip(tokens, output.outputs[0].logprobs, strict=True)]
    theirs = [float(expected[first + i, token]) for i, token in enumerate(tokens)]
    assert np.allclose(ours, theirs, atol=2e-4), (ours, theirs)


def test_another_image_shares_only_the_text_before_it(llm: LLM) -> None:
    one, two = pictures(2, seed=1)
    start = "import os " * 8

    def ask(image: Image.Image, end: str) -> Any:
        prompt = {"prompt": f"{start}<image>{end}", "multi_modal_data": {"image": image}}
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0]

    first = ask(one, " a")
    second, other = ask(one, " b and more"), ask(two, " a")
    text = len(llm.get_tokenizer().encode(start)) // 16 * 16
    assert second.num_cached_tokens >= 0.8 * len(first.prompt_token_ids)
    assert other.num_cached_tokens == text
    assert other.outputs[0].logprobs != first.outputs[0].logprobs


def test_a_chat_takes_images_of_all_forms(llm: LLM, tmp_path: Path) -> None:
    [image] = pictures(1, seed=2)
    file = BytesIO()
    image.save(file, "PNG")
    path = tmp_path / "image.png"
    path.write_bytes(file.getvalue())
    url = "data:image/png;base64," + b64encode(file.getvalue()).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": str(path)},
        {"type": "image", "image": image},
        {"type": "image_pil", "image_pil": image},
    ]
    chats = [[{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}] for part in parts]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    assert {output.prompt for output in outputs} == {"What?<image>"}
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


@pytest.mark.parametrize(
    ("prompt", "image", "reason"),
    [
        ("<image>", "https://host/x.png", "give a path, a data URL or an image"),
        ("<image>", "data:image/png,abc", "begins with data:image/png;base64,"),
        ("<image>", "data:image/png;base64,a", "not valid base64"),
        ("<image>", "data:image/png;base64,é", "not valid base64"),
        ("<image>", "/dev/zero", "no regular file"),
        ("<image>", [], "has no image"),
        ("<image>", "data:image/png;base64,YWJj", "must be one of PNG, JPEG"),
        ("<image>", "/no/such/file.png", "cannot be read"),
        ("<image>", Image.new("L", (2**13, MAX_PIXELS // 2**13 + 1)), "8192 x 2049 pixels; it must have at most"),
        ("no mark", pictures(1)[0], "do not fit the prompt"),
        ("<image><image>", pictures(1)[0], "do not fit the prompt"),
    ],
)
def test_what_is_no_image_is_refused(llm: LLM, prompt: str, image: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        llm.generate({"prompt": prompt, "multi_modal_data": {"image": image}}, GREEDY)


def test_what_images_do_not_serve_is_refused(llm: LLM) -> None:
    prompt = {"prompt": "<image> a", "multi_modal_data": {"image": pictures(1)[0]}}
    with pytest.raises(RequestError, match="prompt_logprobs is given, and the prompt has images"):
        llm.generate(prompt, SamplingParams(prompt_logprobs=0))
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 4, and the prompt has images"):
        llm.generate(prompt, SamplingParams(truncate_prompt_tokens=4))
    with pytest.raises(RequestError, match="a beam search reads text alone"):
        llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(RequestError, match="give the prompt as a text"):
        llm.generate({"prompt_token_ids": [5], "multi_modal_data": {"image": pictures(1)[0]}})
    with pytest.raises(RequestError, match="it must be"):
        llm.generate({"prompt": "a", "multi_modal_data": {"audio": 1}})
    with LLM(num_blocks=16) as text, pytest.raises(RequestError, match="this model is served for text alone"):
        text.generate({"prompt": "a", "multi_modal_data": {"image": pictures(1)[0]}})


def test_replaced_weights_have_their_own_encoder_and_blocks(smolvlm: Path) -> None:
    prompt = {"prompt": "def f <image> def f", "multi_modal_data": {"image": pictures(1, seed=5)[0]}}
    with LLM(str(smolvlm), num_blocks=50, **OPTIONS) as llm:
        images = llm.factory.images
        assert isinstance(images, PromptImages)
        before = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2)]
        encoder = images._encoder
        llm.update_weights(str(smolvlm))
        after = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert llm.factory.images is images, "a server has the same object"
        assert images._encoder not in (None, encoder)
    assert (before[1].num_cached_tokens > 0, after.num_cached_tokens) == (True, 0)
    assert after.outputs[0].token_ids == before[0].outputs[0].token_ids


def test_an_image_that_one_step_computes_must_fit(tmp_path: Path) -> None:
    mark = save_images_model(tmp_path, "gemma3")
    prompt = {"prompt": f"a {mark} b", "multi_modal_data": {"image": pictures(1)[0]}}
    for budget, most in ((18, 15), (19, 16)):
        with LLM(str(tmp_path), num_blocks=50, max_num_batched_tokens=budget, max_num_seqs=4, **OPTIONS) as llm:
            if most == 16:
                assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
                continue
            with pytest.raises(RequestError, match=r"image of 16 rows.*at most 15: raise max_num_batched_tokens to 19"):
                llm.generate(prompt, GREEDY, use_tqdm=False)


def test_equal_rows_in_other_places_are_other_images() -> None:
    """What is rotated by another grid has other K, so no block of one image may be found for the other."""
    [picture] = pictures(1)
    rows = torch.ones(16, 64)
    tokens = [9, *[3] * 16]
    encoder = SimpleNamespace(placeholder=3, depends_on_count=False, both_ways="no", tokenize=lambda *_: tokens)
    found = []
    for grid in ((1, 4, 4), (1, 2, 8)):
        encoder.encode = lambda *_, grid=grid: EncodedImage(rows, grid)
        own = PromptImages(lambda: encoder, 100)  # type: ignore[arg-type,return-value]
        found.append(own.tokenize("", [picture])[1])
    assert found[0].starts[0][0] == found[1].starts[0][0] == 1
    assert found[0].begun_in(0, 2) != found[1].begun_in(0, 2)
    assert found[0].begun_in(2, 17) == b""
    assert not set(found[0].ids.tolist()) & set(found[1].ids.tolist())
    assert [one.turns.shift for one in found if one.turns] == [12, 8]  # although no text follows the image


def test_a_checkpoint_without_a_processor_refuses_images_alone(smolvlm: Path, tmp_path: Path) -> None:
    shutil.copytree(smolvlm, tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").unlink()
    with LLM(str(tmp_path), num_blocks=50, **OPTIONS) as blind:
        assert blind.generate("class A:", GREEDY, use_tqdm=False)[0].outputs[0].text
        with pytest.raises(RequestError, match="images cannot be read"):
            blind.generate({"prompt": "<image>", "multi_modal_data": {"image": pictures(1)[0]}}, GREEDY)


def test_penalties_drafts_and_samples_work_beside_images(llm: LLM) -> None:
    prompt = {"prompt": "def f <image> def f", "multi_modal_data": {"image": pictures(1)[0]}}
    params = SamplingParams(n=2, seed=3, max_tokens=8, repetition_penalty=1.3, ignore_eos=True)
    first = llm.generate(prompt, params, use_tqdm=False)
    again = llm.generate(prompt, params, use_tqdm=False)
    tokens = [sample.token_ids for sample in first[0].outputs]
    assert [sample.token_ids for sample in again[0].outputs] == tokens
    assert all(token >= 0 for sample in tokens for token in sample)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_images_are_decoded_in_a_child_with_limits() -> None:
    decoder = ImageDecoder()
    try:
        clear = Image.new("RGBA", (3, 2), (255, 0, 0, 0))
        assert decoder.decode(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
        keyed = encoded(Image.new("RGB", (3, 2), (10, 20, 30)), transparency=(10, 20, 30))
        assert decoder.decode(keyed).getpixel((0, 0)) == (255, 255, 255)
        palette = Image.new("P", (3, 2))
        assert decoder.decode(encoded(palette, "GIF")).mode == "RGB"
        turned = Image.new("RGB", (3, 2), "red")
        exif = turned.getexif()
        exif[0x0112] = 6  # the camera was turned by a quarter
        assert decoder.decode(encoded(turned, "JPEG", exif=exif)).size == (2, 3)
        bomb = encoded(Image.new("1", (2**13, MAX_PIXELS // 2**13 + 1)))
        for data, reason in (
            (bomb, "it must have at most"),
            (encoded(pictures(1)[0])[:2000], "truncated"),
            (b"", "must be one of"),
            (encoded(Image.new("I;16", (3, 2))), "must have 8 bits a channel"),
            (b"%PDF-1.4", "must be one of"),
            (encoded(turned, "TIFF"), "must be one of"),
        ):
            with pytest.raises(RequestError, match=reason):
                decoder.decode(data)
        assert decoder.decode(encoded(turned)).getpixel((0, 0)) == (255, 0, 0)
    finally:
        decoder.close()
