"""A layer of experts against its definition in fp64, its bits, and the same as one call of the native library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from quire.errors import BadShape, BadValue, ModelError, Unsupported
from quire.models.decoder_config import ExpertsConfig, MlpConfig
from quire.ops import load, native, unavailable
from quire.ops.activation import Activation
from quire.ops.choice import Choice
from quire.ops.cpu.executor import NativeExecutor
from quire.ops.cpu.experts import ExpertLinears
from quire.ops.cpu.linear import Packer
from quire.ops.experts import ExpertLayer, weighted_experts
from quire.ops.program import MixExperts, Place, Program
from quire.ops.weights.linear import PlainLinear
from quire.ops.weights.quantised import quantised
from tests.marks import spread
from tests.ops.conftest import OTHER_ISAS, use_library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or "")
ISAS = [None, *OTHER_ISAS]
# H, I, E, k: one expert, all of them, many, sizes that fill no vector
SHAPES = ((48, 40, 4, 2), (33, 17, 5, 5), (64, 8, 1, 1), (32, 24, 40, 8), (130, 65, 3, 1))
ROWS = (1, 2, 3, 17, 120)


@pytest.fixture(autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The best instruction set, or the one that a test asks for; the number of threads is put back."""
    use_library(request, monkeypatch, getattr(request, "param", None))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Made:
    """A layer on a backend."""

    layer: ExpertLayer
    backend: str
    device: str = "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        return load(self.backend, self.device).experts(x, self.layer)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer.router(x).float()
        return load(self.backend, self.device).choose(logits, self.layer.choice)


class Layer:
    """Random weights, and rows. The first input of a row is 1, so that the router's first column says whom all like."""

    def __init__(self, hidden: int, inner: int, count: int, k: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(hidden + inner + count)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

        self.k = k
        self.router, self.mlp_in = 3 * weight(count, hidden), [weight(2 * inner, hidden) for _ in range(count)]
        self.mlp_out = [weight(hidden, inner) for _ in range(count)]
        self.x = torch.randn(max(ROWS), hidden, generator=generator).to(dtype)
        self.x[:, 0] = 1

    def choice(self, renormalised: bool) -> Choice:
        return Choice(num_chosen=self.k, renormalised=renormalised)

    def made(self, *, backend: str = "cpu", renormalised: bool = True) -> Made:
        linears = load(backend).linears("cpu")
        mlp_in, mlp_out = ([linears.linear(weight) for weight in weights] for weights in (self.mlp_in, self.mlp_out))
        return Made(ExpertLayer(linears.head(self.router), mlp_in, mlp_out, self.choice(renormalised)), backend)

    def packed(self, *, renormalised: bool = True) -> ExpertLayer:
        pack = Packer()
        mlp_in, mlp_out = ([pack(weight) for weight in weights] for weights in (self.mlp_in, self.mlp_out))
        return ExpertLayer(pack(self.router, out_dtype=torch.float32), mlp_in, mlp_out, self.choice(renormalised))

    def program(self, *, renormalised: bool = True) -> NativeExecutor:
        x, out = (Place(name, 0, self.x.shape[1]) for name in ("in", "out"))
        operators = [MixExperts(x, self.packed(renormalised=renormalised), out)]
        return NativeExecutor(Program(self.x.dtype, x, out, {"in": x.size, "out": x.size}, operators))

    def exact(self, x: Tensor, renormalised: bool) -> Tensor:
        """The definition, row by row and expert by expert."""
        x = x.double()
        shares = torch.softmax(x @ self.router.double().T, -1)
        best, chosen = shares.sort(dim=-1, descending=True, stable=True)
        out = torch.zeros_like(x)
        for i, row in enumerate(x):
            own = best[i, : self.k] / (best[i, : self.k].sum() if renormalised else 1)
            for expert, share in zip(chosen[i, : self.k].tolist(), own, strict=True):
                gate, up = (self.mlp_in[expert].double() @ row).chunk(2)
                out[i] += share * (self.mlp_out[expert].double() @ (torch.nn.functional.silu(gate) * up))
        return out


class NoCaches:
    """For a program without attention."""


def run(program: NativeExecutor, x: Tensor) -> Tensor:
    return program(x.clone(), torch.arange(len(x)), NoCaches(), [])


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_native)])
def test_what_it_computes(backend: str, shape: tuple[int, int, int, int], renormalised: bool) -> None:
    layer = Layer(*shape)
    made = layer.made(backend=backend, renormalised=renormalised)
    for rows in (0, *ROWS):
        exact = layer.exact(layer.x[:rows], renormalised)
        torch.testing.assert_close(made(layer.x[:rows]).double(), exact, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_native)])
@pytest.mark.parametrize("k", [1, 3])
def test_shares_of_what_experts_see(backend: str, k: int) -> None:
    """Of a row times the sigmoid of its logit each, as Llama 4 has it."""
    made = (layer := Layer(48, 40, 4, k)).made(backend=backend)
    choice = Choice(num_chosen=k, renormalised=False, scores="sigmoid")
    x, exact = layer.x[:17], torch.zeros(17, 48, dtype=torch.float64)
    logits = x.double() @ layer.router.double().T
    for i, chosen in enumerate(logits.topk(k).indices.tolist()):
        for expert in chosen:
            gate, up = (layer.mlp_in[expert].double() @ (x[i].double() * logits[i, expert].sigmoid())).chunk(2)
            exact[i] += layer.mlp_out[expert].double() @ (torch.nn.functional.silu(gate) * up)
    found = replace(made, layer=replace(made.layer, choice=choice, weighed="inputs"))(x)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_with_the_frameworks_own_product(backend: str, shape: tuple[int, int, int, int]) -> None:
    """As on a GPU; where there is none, in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if reason := unavailable(backend, device):
        pytest.skip(reason)
    layer = Layer(*shape)

    def plain(weight: Tensor) -> PlainLinear:
        return PlainLinear(weight.to(device), None)

    mlp_in, mlp_out = ([plain(weight) for weight in weights] for weights in (layer.mlp_in, layer.mlp_out))
    made = Made(ExpertLayer(plain(layer.router), mlp_in, mlp_out, layer.choice(True)), backend, device)
    for rows in (0, 1, 17):
        x = layer.x[:rows]
        torch.testing.assert_close(made(x.to(device)).cpu().double(), layer.exact(x, True), atol=2e-6, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_types_stay_close(dtype: torch.dtype) -> None:
    layer = Layer(64, 96, 8, 2, dtype)
    exact = layer.exact(layer.x, True)
    assert (layer.made()(layer.x).double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(("isa", "dtype", "renormalised"), spread(2, ISAS, DTYPES, [False, True]), indirect=["isa"])
def test_the_native_operator_has_the_same_bits(dtype: torch.dtype, renormalised: bool) -> None:
    """And no bit of a row depends on the others, whose number goes up and down, or on the threads."""
    for shape in SHAPES:
        layer = Layer(*shape, dtype)
        made, program = layer.made(renormalised=renormalised), layer.program(renormalised=renormalised)
        whole = made(layer.x)
        assert whole.isfinite().all()
        for rows in (*ROWS, *reversed(ROWS), 0):
            for first in (0, max(ROWS) - rows):
                part = slice(first, first + rows)
                assert torch.equal(run(program, layer.x[part]), whole[part])
            assert torch.equal(made(layer.x[:rows]), whole[:rows])
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(run(program, layer.x), whole)
        assert torch.equal(made(layer.x), whole)


@needs_native
def test_large_enough_for_several_threads() -> None:
    layer = Layer(256, 512, 6, 2, torch.bfloat16)
    whole = layer.made()(layer.x)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        program = layer.program()
        for rows in (1, 5, 100):
            assert torch.equal(run(program, layer.x[:rows]), whole[:rows])


@needs_native
@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
def test_experts_that_get_all_rows_one_or_none(backend: str) -> None:
    layer = Layer(48, 40, 6, 2)
    layer.router[:, 0] = torch.tensor([0.0, 50.0, -50.0, 0.0, -25.0, 0.0])
    layer.router[:, 1] = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    layer.x[:, 1] = 0.0
    layer.x[77, 1] = 50.0  # the one row that likes the fifth
    made = layer.made(backend="cpu" if backend == "native" else backend)
    counts = made.choose(layer.x)[0].flatten().bincount(minlength=6)
    assert (counts[1], counts[2], counts[4]) == (120, 0, 1)
    found = run(layer.program(), layer.x) if backend == "native" else made(layer.x)
    torch.testing.assert_close(found.double(), layer.exact(layer.x, True), atol=2e-6, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
def test_of_equal_experts_the_first_are_chosen(backend: str) -> None:
    layer = Layer(48, 40, 20, 3)
    layer.router.zero_()
    made = layer.made(backend="cpu" if backend == "native" else backend, renormalised=False)
    chosen, shares = made.choose(layer.x)
    assert chosen.tolist() == [[0, 1, 2]] * 120
    torch.testing.assert_close(shares, torch.full((120, 3), 1 / 20))
    found = run(layer.program(renormalised=False), layer.x) if backend == "native" else made(layer.x)
    torch.testing.assert_close(found.double(), layer.exact(layer.x, False), atol=2e-6, rtol=1e-5)


@needs_native
def test_layers_of_several_shapes_in_one_program() -> None:
    """They share the room that they compute in."""
    layers = [Layer(48, 40, 6, 2), Layer(48, 72, 3, 3), Layer(48, 8, 30, 5)]
    first, between, last = places = [Place(name, 0, 48) for name in ("in", "between", "out")]
    ways = ((first, between), (between, first), (first, last))
    operators = [MixExperts(x, layer.packed(), out) for layer, (x, out) in zip(layers, ways, strict=True)]
    program = NativeExecutor(Program(torch.float32, first, last, {place.buffer: 48 for place in places}, operators))
    for rows in (3, 100, 7):
        expected = x = layers[0].x[:rows]
        for layer in layers:
            expected = layer.made()(expected)
        assert torch.equal(run(program, x), expected)


CHOICES = {
    "sigmoids, groups": {"scores": "sigmoid", "groups": 3, "groups_chosen": 2, "factor": 2.5},
    "corrected": {"bias": torch.linspace(-0.2, 0.2, 12)},
    "corrected sigmoids": {"scores": "sigmoid", "bias": torch.linspace(-0.2, 0.2, 12), "renormalised": False},
    "scaled": {"scales": torch.linspace(0.5, 1.5, 12)},
}
ACTIVATIONS = {
    "clamped": Activation("silu", slope=1.702, limit=0.5, offset=1.0),
    "gelu": Activation("gelu_tanh"),
    "no gate": Activation("relu_squared", gated=False),
}


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("weighed", "choice", "activation", "dtype"),
    spread(3, ["results", "inputs"], CHOICES, ACTIVATIONS, [torch.float32, torch.bfloat16]),
)
def test_the_native_operator_has_the_same_bits_with_all_options(
    weighed: Literal["results", "inputs"], choice: str, activation: str, dtype: torch.dtype
) -> None:
    """Biases of the router and of experts, and a router that sees other rows than these."""
    activates, generator = ACTIVATIONS[activation], torch.Generator().manual_seed(7)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    hidden, inner, count, pack = 48, 40, 12, Packer()
    both = 2 * inner if activates.gated else inner
    layer = ExpertLayer(
        pack(3 * weight(count, hidden), weight(1, count)[0], torch.float32),
        [pack(weight(both, hidden), weight(1, both)[0]) for _ in range(count)],
        [pack(weight(hidden, inner), weight(1, hidden)[0]) for _ in range(count)],
        Choice(**{"num_chosen": 4, "renormalised": True} | CHOICES[choice]),
        activates,
        weighed,
    )
    x, seen, out = (Place(name, first, hidden) for name, first in (("in", 0), ("in", hidden), ("out", 0)))
    given, widths = Place("in", 0, 2 * hidden), {"in": 2 * hidden, "out": hidden}
    program = NativeExecutor(Program(dtype, given, out, widths, [MixExperts(x, layer, out, seen)]))
    rows = torch.randn(50, 2 * hidden, generator=generator).to(dtype)
    expected = load("cpu").experts(rows[:, :hidden], layer, rows[:, hidden:])
    together = run(program, rows)
    assert torch.equal(together, expected)
    for count in (1, 7):
        assert torch.equal(run(program, rows[:count]), together[:count])


@needs_native
def test_linears_that_do_not_fit_are_refused() -> None:
    packed = Layer(48, 40, 6, 2).packed()
    other = Layer(40, 48, 6, 2).packed()
    with pytest.raises(BadShape, match=r"mlp_in has .*\(40, 96, .*; expected \(48, 80, "):
        ExpertLinears.of(replace(packed, mlp_in=[*packed.mlp_in[:5], other.mlp_in[0]]))
    with pytest.raises(BadShape, match=r"router has .*48, 5,"):
        ExpertLinears.of(replace(packed, mlp_in=packed.mlp_in[:5], mlp_out=packed.mlp_out[:5]))
    with pytest.raises(BadShape, match=r"router has .*torch\.bfloat16"):
        ExpertLinears.of(replace(packed, router=Packer()(torch.ones(6, 48, dtype=torch.bfloat16))))
    with pytest.raises(BadShape, match="6 mlp_in and 5 mlp_out; they are pairs"):
        replace(packed, mlp_out=packed.mlp_out[:5])
    with pytest.raises(BadValue, match=r"2 experts of 0 are to be chosen"):
        replace(packed, mlp_in=[], mlp_out=[])
    with pytest.raises(BadValue, match=r"7 experts of 6 are to be chosen; it must be 1\.\.6"):
        replace(packed, choice=Choice(num_chosen=7, renormalised=True))


@pytest.mark.parametrize("per_token", [0, 5])
def test_a_number_of_experts_that_cannot_be_chosen(per_token: int) -> None:
    with pytest.raises(ModelError, match=f"{per_token} experts a token cannot be chosen of 4"):
        ExpertsConfig(count=4, per_token=per_token, mlp=MlpConfig(size=8), renormalised=True)


@needs_native
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kinds", [((4, 32), (4, 32)), ((8, 10**9), (4, 128))], ids=str)
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_quantised_experts(shape: tuple[int, int, int, int], kinds: tuple[tuple[int, int], ...]) -> None:
    """One call of the library has the bits of the experts one by one, and every row those that it has alone.

    kinds: bits and group size of what goes into an expert, and of what comes out.
    """
    plain, pack = Layer(*shape, torch.bfloat16), Packer()
    mlp_in, mlp_out = (
        [pack(quantised(weight, *kind, torch.bfloat16)) for weight in weights]
        for weights, kind in zip((plain.mlp_in, plain.mlp_out), kinds, strict=True)
    )
    layer = ExpertLayer(pack(plain.router, out_dtype=torch.float32), mlp_in, mlp_out, plain.choice(True))
    place = Place("x", 0, shape[0])
    program = NativeExecutor(Program(torch.bfloat16, place, place, {"x": shape[0]}, [MixExperts(place, layer, place)]))
    one_by_one = weighted_experts(plain.x, layer, load("cpu").choose, load("cpu").activate)
    together = run(program, plain.x)
    assert torch.equal(together, one_by_one)
    for rows in ROWS:
        assert torch.equal(run(program, plain.x[:rows]), together[:rows])


@needs_native
def test_experts_that_are_quantised_in_different_ways_are_refused() -> None:
    plain, pack = Layer(48, 40, 4, 2), Packer()
    mlp_in = [pack(quantised(weight, 8, 10**6, torch.float32)) for weight in plain.mlp_in[:3]] + [pack(plain.mlp_in[3])]
    router, mlp_out = pack(plain.router, out_dtype=torch.float32), [pack(weight) for weight in plain.mlp_out]
    with pytest.raises(Unsupported, match="quantised in different ways"):
        ExpertLinears.of(ExpertLayer(router, mlp_in, mlp_out, plain.choice(True)))
