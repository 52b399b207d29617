"""The native library: its path, the instruction sets that this machine runs, and its C entry points.

The structures below are those of cpu/csrc/params.h, field by field.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quire.errors import Unsupported
from quire.ops import fetching
from quire.ops.activation import FUNCTIONS, Activation
from quire.ops.choice import Choice

# Instruction sets of x86-64 and of Arm, the best first; the last one is for tests.
ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon_dot", "neon", "amx_emulated")
# Reasons why machine_x86.cpp refuses AMX, by number.
AMX_REFUSALS = (
    None,
    "this CPU lacks AVX512_BF16",
    "this CPU has no AMX tiles for bf16 and int8",
    "the operating system does not save AMX tiles",
    "the operating system does not permit this process to use AMX tiles",
    "the sums of this CPU's AMX tiles are not in the documented order",
    "this library was built without the kernels for AMX",
)
FLOOR = "glibc 2.28 and the libstdc++ of GCC 8, or later"  # required by the wheels, as by PyTorch's
TILE_ROWS = 16
MANY_ROWS = 2**31 - 1  # a number for which rows are copied, if they are copied for any number
NO_MEMORY = 1  # returned by plan_update
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INT8 = 3  # only of caches
MOST_LANES = 16  # numbers of a vector
NO_KERNELS = "none"  # instead of an instruction set
_isa: ContextVar[str | None] = ContextVar("isa", default=None)  # of `default`; None: the best


class SpecParams(Structure):
    """The constants of all steps, from an AttentionSpec."""

    _fields_ = [
        (name, c_int32)
        for name in (
            "num_heads num_kv_heads head_dim head_dim_v block_size causal window dtype kv_dtype item_rows "
            "memory_rows latent".split()
        )
    ]  # fmt: skip


class StepParams(Structure):
    """One step's metadata."""

    _fields_ = [
        *((name, c_void_p) for name in "query_starts context_lens block_tables slots key_ends nonfinite".split()),
        ("table_stride", c_int64),
        ("num_seqs", c_int32),
        ("num_threads", c_int32),
    ]


class CacheParams(Structure):
    """A layer's cache: addresses, and strides in elements."""

    _fields_ = [
        *((name, c_void_p) for name in "k v k_scale v_scale".split()),
        *((f"{name}_{dim}", c_int64) for name in "k v k_scale v_scale".split() for dim in "block head slot".split()),
    ]


class AttentionParams(Structure):
    """One call of attention: addresses, strides in elements, and the rule of the scores."""

    _fields_ = [
        ("cache", CacheParams),
        *((name, c_void_p) for name in "q out lse alibi_slopes sinks".split()),
        *((name, c_int64) for name in "q_token q_head out_token out_head".split()),
        ("slope_seq", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("chunk", c_int32),
    ]


class WriteParams(Structure):
    """One call of write_kv: addresses, and strides in elements."""

    _fields_ = [
        ("cache", CacheParams),
        *((name, c_void_p) for name in "k_new v_new".split()),
        *((name, c_int64) for name in "k_new_token k_new_head v_new_token v_new_head".split()),
    ]


class IndexParams(Structure):
    """One call of index_scores: addresses, strides in elements, and sizes."""

    _fields_ = [
        *((name, c_void_p) for name in "q weights keys tables sequences counts room out".split()),
        *((name, c_int64) for name in "key_block key_slot table_stride rows heads dim width block_size".split()),
        ("dtype", c_int32),
    ]


class LinearParams(Structure):
    """One product: addresses, the strides of rows of x and of the result in elements, and sizes."""

    _fields_ = [
        *((name, c_void_p) for name in "x weight bias out copy".split()),
        *((name, c_int64) for name in "x_stride out_stride rows in_size out_size".split()),
        *((name, c_int32) for name in "dtype out_dtype threads bits sub zeros halves minimums narrow".split()),
        *((name, c_int64) for name in "group activation_group".split()),
        *((name, c_void_p) for name in "scales order".split()),
    ]


class IntegerParts(Structure):
    """The tensors of a quantised weight."""

    _fields_ = [(name, c_void_p) for name in "values scales zeros minimums sub_scales sub_minimums".split()]


class RoundParams(Structure):
    """A weight that is rounded to integers."""

    _fields_ = [
        *((name, c_void_p) for name in "weight values scales".split()),
        *((name, c_int64) for name in "stride rows in_size group".split()),
        *((name, c_int32) for name in "dtype bits threads".split()),
    ]


class RecurrentStep(Structure):
    """The sizes of a state kind, and one step's metadata."""

    _fields_ = [
        *((name, c_int64) for name in "heads k_heads dim_k dim_v width taps".split()),
        *((name, c_void_p) for name in "query_starts context_lens state_tables row_tables nonfinite".split()),
        *((name, c_int64) for name in "table_stride num_seqs num_rows".split()),
    ]


class RecurrentRecords(Structure):
    """A layer's records: addresses, and strides of records in elements."""

    _fields_ = [
        *((name, c_void_p) for name in "state tail keys updates decays inputs".split()),
        *((f"{name}_record", c_int64) for name in "state tail keys updates decays inputs".split()),
    ]


class ConvolutionParams(Structure):
    """One call of convolve: addresses, and strides of rows."""

    _fields_ = [
        ("cache", RecurrentRecords),
        *((name, c_void_p) for name in "weight bias x out".split()),
        *((name, c_int64) for name in "x_stride out_stride".split()),
        ("silu", c_int32),
    ]


class RecurrenceParams(Structure):
    """One call of the gated delta rule or, with a skip, of Mamba-2's recurrence."""

    _fields_ = [
        ("cache", RecurrentRecords),
        *((name, c_void_p) for name in "decay_rate dt_bias skip x gates out".split()),
        *((name, c_int64) for name in "x_stride gates_stride out_stride".split()),
        *((name, c_float) for name in "dt_low dt_high scale".split()),
        ("threads", c_int32),
    ]


# The operators of a program, in the order of their numbers.
OPS = (
    *"linear norm rope write attention activation multiply add copy".split(),
    *"scale keep experts gate gated_norm convolution gated_delta state_space lora gather scan".split(),
)
SCAN_RULES = ("delta", "selective", "lru")  # in the order of their numbers
MAX_BUFFERS = 32
MOST_RANKS = 8  # of a tensor-parallel group


class NativeColumns(Structure):
    """Columns of a buffer, starting with `first`; buffer -1: none."""

    _fields_ = [("buffer", c_int32), ("first", c_int32)]


class ScanParams(Structure):
    """One call of a recurrence whose decay differs between the elements of a state."""

    _fields_ = [
        ("cache", RecurrentRecords),
        *((name, c_void_p) for name in "rate bias skip x gates side out".split()),
        *((name, c_int64) for name in "x_stride gates_stride side_stride out_stride".split()),
        *((name, c_float) for name in "scale floor".split()),
        *((name, c_int32) for name in "rule threads".split()),
        ("side_columns", NativeColumns),
    ]


class Op(Structure):
    """An operator of a program."""

    _fields_ = [
        ("kind", c_int32),
        ("group", c_int32),
        *((name, NativeColumns) for name in "x y out".split()),
        ("params", c_void_p),
    ]


class NormParams(Structure):
    """A norm over `heads` rows of each token: RMSNorm, or LayerNorm with a bias."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("heads", c_int64), ("dim", c_int64), ("eps", c_float)]


class GatedNormParams(Structure):
    """A gated norm over `heads` parts of each row."""

    _fields_ = [
        ("weight", c_void_p),
        *((name, c_int64) for name in "heads dim".split()),
        ("eps", c_float),
        ("gate_first", c_int32),
    ]


class RopeParams(Structure):
    """A rotation by tables of `length` positions."""

    _fields_ = [
        *((name, c_void_p) for name in "cos sin".split()),
        *((name, c_int64) for name in "length half q_heads k_heads head_dim".split()),
    ]


class EachParams(Structure):
    """An elementwise operator on the `dim` numbers of a row."""

    _fields_ = [("dim", c_int64), ("factor", c_float)]


class GateParams(Structure):
    """`dim` numbers of a row, multiplied by the sigmoid of `dim` gates, or of one for all of them."""

    _fields_ = [("gates", c_int64), ("dim", c_int64)]


class ActivationParams(Structure):
    """An activation with `dim` results per row."""

    _fields_ = [
        ("dim", c_int64),
        *((name, c_int32) for name in "function gated".split()),
        *((name, c_float) for name in "slope limit offset".split()),
    ]

    @classmethod
    def of(cls, activation: Activation, dim: int) -> ActivationParams:
        """Describe an activation with `dim` results per row."""
        limit = math.inf if activation.limit is None else activation.limit
        number = FUNCTIONS.index(activation.function)
        return cls(dim, number, activation.gated, activation.slope, limit, activation.offset)


class ChoiceParams(Structure):
    """The rule that chooses a row's experts and their shares from the router's logits."""

    _fields_ = [
        *((name, c_void_p) for name in "bias scales".split()),
        *((name, c_int64) for name in "num_experts num_chosen groups groups_chosen group_best".split()),
        *((name, c_int32) for name in "sigmoid renormalised".split()),
        *((name, c_float) for name in "epsilon factor".split()),
    ]

    @classmethod
    def of(cls, choice: Choice, count: int) -> ChoiceParams:
        """Describe a choice among `count` experts. The structure points to the choice's tensors."""
        bias, scales = (None if x is None else x.data_ptr() for x in (choice.bias, choice.scales))
        sizes = count, choice.num_chosen, choice.groups, choice.groups_chosen, choice.group_best
        return cls(bias, scales, *sizes, choice.scores == "sigmoid", choice.renormalised, choice.epsilon, choice.factor)


class GatherParams(Structure):
    """Columns that are divided among the ranks of a group: the exchange's address, and the columns of each rank."""

    _fields_ = [("exchange", c_void_p), ("sizes", c_int64 * MOST_RANKS)]


class ExpertsParams(Structure):
    """A layer of experts: its linears, its rule of choice, and working memory."""

    _fields_ = [
        *((name, POINTER(LinearParams)) for name in "router mlp_in mlp_out".split()),
        ("choice", ChoiceParams),
        ("activation", ActivationParams),
        ("weighs_inputs", c_int64),
        ("inner_columns", GatherParams),
        *(
            (name, c_void_p)
            for name in "logits scores heaps chosen shares places gathered inner activated copy results".split()
        ),
    ]


class LoraPart(Structure):
    """The low-rank update by an adapter of some columns of a linear's results."""

    _fields_ = [
        ("b", c_void_p),
        *((name, c_int64) for name in "first_rank rank first size".split()),
        ("scale", c_float),
    ]


class LoraSlot(Structure):
    """An adapter's matrices for one linear; a null address: none."""

    _fields_ = [
        *((name, c_void_p) for name in "a parts".split()),
        *((name, c_int64) for name in "rank num_parts".split()),
    ]


class LoraParams(Structure):
    """The adapters of a linear, and the addresses and strides of rows of one call."""

    _fields_ = [
        *((name, c_void_p) for name in "slots x out room".split()),
        *((name, c_int64) for name in "x_stride out_stride in_size most_rank".split()),
    ]


class ProgramParams(Structure):
    """One run of a program."""

    _fields_ = [
        ("ops", POINTER(Op)),
        ("num_ops", c_int64),
        *((name, c_void_p) for name in "seconds positions".split()),
        ("plans", POINTER(c_void_p)),
        ("buffers", c_void_p * MAX_BUFFERS),
        ("strides", c_int64 * MAX_BUFFERS),
        ("rows", c_int64),
        ("kept", c_void_p),
        ("num_kept", c_int64),
        ("lora_slots", c_void_p),
        ("dtype", c_int32),
        ("threads", c_int32),
    ]


class ChainParams(Structure):
    """Draft tokens of a head, computed one after the other."""

    _fields_ = [
        ("program", POINTER(ProgramParams)),
        ("embedding", POINTER(LinearParams)),
        ("rows", c_void_p),
        ("head", POINTER(LinearParams)),
        ("targets", c_void_p),
        ("plans", POINTER(c_void_p)),
        ("steps", POINTER(POINTER(StepParams))),
        ("block_sizes", POINTER(c_int32)),
        ("num_plans", c_int64),
        *((name, c_void_p) for name in "counts tokens".split()),
    ]


# Entry points of every instruction set: result, and arguments after the address of torch's parallel_for.
_P, _I, _L, _F = c_void_p, c_int32, c_int64, c_float
KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "item_sizes": (None, (POINTER(SpecParams),)),
    "attention": (None, (_P, POINTER(AttentionParams))),
    "write_kv": (None, (_P, POINTER(WriteParams))),
    "index_scores": (None, (POINTER(IndexParams),)),
    "merge_states": (None, (_P, _P, _P, _P, _P, _P, _L, _L, _I)),
    "apply_sinks": (None, (_P, _P, _P, _P, _L, _L, _L, _I)),
    "rms_norm": (None, (_P, _L, _L, _L, _P, _L, _P, _P, _L, _L, _L, _F, _I)),
    "layer_norm": (None, (_P, _L, _L, _L, _P, _L, _P, _P, _P, _L, _L, _L, _F, _I)),
    "rope": (_L, (_P, _L, _L, _L, _P, _L, _L, _L, _P, _P, _P, _L, _L, _L, _I)),
    "linear": (None, (POINTER(LinearParams),)),
    "program": (_L, (POINTER(ProgramParams),)),
    "chain": (_L, (POINTER(ChainParams),)),
    "packed_bytes": (_L, (POINTER(LinearParams),)),
    "row_lanes": (_L, (POINTER(LinearParams),)),
    "row_stride": (_L, (_L, _I)),
    "copy_size": (_L, (POINTER(LinearParams), _L, _L)),
    "pack": (None, (POINTER(LinearParams), _P, _L, _P)),
    "pack_values": (None, (POINTER(LinearParams), POINTER(IntegerParts), _P)),
    "pack_blocks": (None, (POINTER(LinearParams), _I, _P, _P)),
    "pack_narrow": (None, (POINTER(LinearParams), _P, _P, _P)),
    "unpack": (_L, (POINTER(LinearParams), _P, _L, _P)),
    "lora_bytes": (_L, (_L, _L, _I)),
    "lora_pack": (None, (_P, _L, _L, _P, _I)),
    "lora_room": (_L, (_L, _L, _I)),
    "lora": (None, (POINTER(LoraParams), _P, _L, _I)),
    "swiglu": (None, (_P, _L, _P, _L, _L, _L, _I)),
    "gelu": (None, (_P, _L, _L, _L, _P, _L, _L, _L, _I, _I)),
    "activate": (None, (_P, _L, _P, _L, _L, POINTER(ActivationParams), _I)),
    "choose": (None, (_P, _P, _P, _P, _P, _L, POINTER(ChoiceParams))),
    "gate": (None, (_P, _L, _P, _L, _L, POINTER(GateParams), _I)),
    "gated_norm": (None, (_P, _L, _P, _L, _P, _L, _L, POINTER(GatedNormParams), _I)),
    "convolve": (None, (POINTER(RecurrentStep), POINTER(ConvolutionParams), _I)),
    "recur": (None, (POINTER(RecurrentStep), POINTER(RecurrenceParams), _I)),
    "scan": (None, (POINTER(RecurrentStep), POINTER(ScanParams), _I)),
    "logsumexp": (None, (_P, _L, _P, _L, _L)),
    "top_k": (None, (_P, _L, _P, _P, _L, _L, _L)),
    "top_k_softmax": (None, (_P, _L, _P, _P, _P, _L, _L, _L)),
    "read": (None, (_P, _L, _P, _L)),
    "multiply": (_L, (_L, _P, _L)),
}


@dataclass(frozen=True)
class Library:
    """The library as loaded, with the kernels of one instruction set."""

    path: Path
    isa: str
    fetching: fetching.Fetching
    parallel_for: int  # address of torch's function
    kernels: dict[str, Callable[..., Any]]
    plan_new: Callable[..., int]
    plan_free: Callable[..., None]
    plan_update: Callable[..., int]
    plan_view: Callable[..., int]
    num_items: Callable[..., int]
    num_phases: Callable[..., int]
    num_parts: Callable[..., int]
    copy_blocks: Callable[..., None]
    read_blocks: Callable[..., None]
    round_weight: Callable[..., None]

    def __call__(self, kernel: str, *arguments: object) -> Any:
        """Run a kernel on torch's threads."""
        return self.kernels[kernel](self.parallel_for, *arguments)


def copied_rows(rows: int) -> int:
    """Return the number of rows to allocate for a copy of x: a tile reads whole blocks of them."""
    return rows + TILE_ROWS - 1


def library_path() -> Path:
    """Return the path of the library, which the build puts next to its sources."""
    return Path(__file__).parent / "cpu" / "libquire_cpu.so"


def unavailable() -> str | None:
    """Return the reason why the native kernels cannot run on this machine, or None if they can."""
    if _isa.get() == NO_KERNELS:
        return "this run uses no native kernels"
    path = library_path()
    if not path.exists():
        return f"the native library {path.name} was not built for this platform"
    try:
        served = runnable(path)
    except OSError as error:
        return _refused(path, error)
    if not served:
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        if x86 and "avx2" in built(path):
            return "this CPU lacks AVX2, which the native kernels need"
        return f"this CPU lacks the instruction sets that the library was built for: {', '.join(built(path))}"
    if not hasattr(_torch_library(), "torch_parallel_for"):
        return f"torch {torch.__version__} does not export its thread pool; torch 2.10 or later does"
    return None


def _refused(path: Path, error: OSError) -> str:
    """Return a message with the loader's error and a remedy."""
    if "GLIBC" not in str(error):  # nor GLIBCXX
        return f"the native library {path} cannot be loaded: {error}"
    here = " ".join(platform.libc_ver()).strip() or "another C library"
    return (
        f"the native library was built for newer system libraries than this system has ({error}). Quire's wheels need "
        f"{FLOOR}; this system has {here}. Install Quire from its source here, which needs a C++ compiler, or take a "
        "newer system"
    )


@cache
def built(path: Path) -> tuple[str, ...]:
    """Return the instruction sets that the library has, the best first. Asked of the library once."""
    library = ctypes.CDLL(str(path))
    return tuple(isa for isa in ISAS if hasattr(library, f"quire_linear_{isa}"))


@cache
def runnable(path: Path) -> tuple[str, ...]:
    """Return the instruction sets of the library that this machine runs, the best first. Asked of the library once."""
    return tuple(isa for isa in built(path) if _runs(path, isa))


def _runs(path: Path, isa: str) -> bool:
    """Return whether this machine runs an instruction set, even if the library lacks its kernels."""
    runs = getattr(ctypes.CDLL(str(path)), f"quire_runs_{isa}", None)
    return runs is not None and bool(runs())


def _refusal(path: Path, isa: str) -> str:
    """Return the reason why the kernels for an instruction set cannot be used, and how to build them if that helps."""
    if isa in built(path) or not _runs(path, isa):
        return f"this machine does not run the kernels for {isa!r}; it runs {', '.join(runnable(path))}"
    sets = ";".join((*built(path), isa))
    return (
        f"the native library was built without the kernels for {isa!r}; it has those for {', '.join(built(path))}. In "
        f"a clone of the repository, build them with: pip install --config-settings 'cmake.define.QUIRE_ISAS={sets}' ."
    )


def amx_refusal() -> str | None:
    """Return the reason why the kernels for AMX do not run on this machine, or None if they do."""
    refusal = getattr(ctypes.CDLL(str(library_path())), "quire_amx_refusal", None)
    return "only CPUs of x86-64 have AMX" if refusal is None else AMX_REFUSALS[refusal()]


@cache
def _fetching(path: Path) -> fetching.Fetching:
    """Choose and set the library's default prefetching. Cached, since `Backend.set_prefetch` may change it later."""
    library = ctypes.CDLL(str(path))
    chosen = fetching.choose(library)
    fetching.apply(library, chosen)
    return chosen


def load(isa: str | None = None, path: Path | None = None) -> Library:
    """Load the library with the kernels of an instruction set, by default the best that this machine runs.

    Raises Unsupported if the library or the kernels cannot be used.
    """
    if reason := unavailable():
        raise Unsupported(reason)
    path = path or library_path()
    served = runnable(path)
    isa = isa or served[0]
    if isa not in served:
        raise Unsupported(_refusal(path, isa))
    native = ctypes.CDLL(str(path))

    def entry(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(native, f"quire_{name}")
        function.restype, function.argtypes = result, arguments
        return function  # type: ignore[no-any-return]

    address = ctypes.cast(_torch_library().torch_parallel_for, c_void_p).value
    return Library(
        path=path,
        isa=isa,
        fetching=_fetching(path),
        parallel_for=address or 0,
        kernels={
            name: entry(f"{name}_{isa}", result, c_void_p, *arguments) for name, (result, arguments) in KERNELS.items()
        },
        plan_new=entry("plan_new", c_void_p, POINTER(SpecParams)),
        plan_free=entry("plan_free", None, c_void_p),
        plan_update=entry("plan_update", c_int32, c_void_p, POINTER(StepParams)),
        plan_view=entry("plan_view", c_void_p, c_void_p),
        num_items=entry("num_items", c_int32, c_void_p),
        num_phases=entry("num_phases", c_int32, c_void_p),
        num_parts=entry("num_parts", c_int32, c_void_p),
        copy_blocks=entry("copy_blocks", None, _P, _P, _L, _L, _L, _L, _L, _L, _P, _P, _L),
        read_blocks=entry("read_blocks", None, _P, _I, _P, _L, _L, _L, _P, _P, _P, _P, _P),
        round_weight=entry("round_weight", None, _P, POINTER(RoundParams)),
    )


def default() -> Library:
    """Return the library with the best kernels for this machine, or with those of `using`. Each is loaded once."""
    return _loaded(_isa.get())


_loaded = cache(load)


@contextmanager
def using(isa: str | None) -> Iterator[None]:
    """Make `default` return the kernels of an instruction set, in this thread.

    A model keeps the kernels with which it was loaded, so it must be loaded and run with the same ones.

    Args:
        isa: an instruction set. None: the best one. NO_KERNELS: none, as on a machine that has no native library.

    Raises:
        Unsupported: if its kernels cannot be used here.
    """
    if isa not in (None, NO_KERNELS):
        _loaded(isa)
    token = _isa.set(isa)
    try:
        yield
    finally:
        _isa.reset(token)


@cache
def _torch_library() -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
