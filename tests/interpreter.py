"""Triton's interpreter, so that kernels run on CPU tensors: `enable()` repairs what triton 3.6.0 gets wrong there.

bf16 and fp8 are kept as unsigned integers by the interpreter and mistaken for such by most of its operations; here
torch converts them, and they are computed with in fp32. Call `enable()` before a module with kernels is imported.

Most of its time goes into describing the type of every value anew; here each shape and dtype is described once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
SIGNED = {1: np.int8, 2: np.int16}  # the integers that torch views


def widen(bits: NDArray[Any], dtype: tl.dtype) -> NDArray[Any]:
    """The numbers after the interpreter's array: fp32 where it holds the bits of bf16 or fp8."""
    if dtype not in NARROW:
        return bits
    signed = torch.from_numpy(np.array(bits.view(SIGNED[bits.itemsize]), order="C"))
    return signed.view(NARROW[dtype]).float().numpy()


def narrow(values: NDArray[Any], dtype: tl.dtype) -> NDArray[Any]:
    """The interpreter's array for numbers of that dtype, rounded to nearest even."""
    storage = interpreter._get_np_dtype(dtype)
    if dtype not in NARROW:
        return values.astype(storage)
    wide = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    signed = torch.int8 if storage.itemsize == 1 else torch.int16
    return wide.to(NARROW[dtype]).view(signed).numpy().view(storage)


def numbers(handle: TensorHandle) -> NDArray[Any]:
    """What `widen` says of a handle. A comparison's result carries the dtype of what was compared."""
    return handle.data if handle.data.dtype == np.bool_ else widen(handle.data, handle.dtype.scalar)


def _handle(values: NDArray[Any], dtype: tl.dtype) -> TensorHandle:
    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    fits = dtype not in NARROW and interpreter._validate_np_data_size(values, dtype)
    return TensorHandle(values if fits else narrow(values, dtype), dtype)


class Repairs:
    """Methods that take the place of those of `InterpreterBuilder`, or that it lacks."""

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(narrow(np.array([value]), tl.bfloat16), tl.bfloat16)

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        return TensorHandle(narrow(numbers(src), dst_type.scalar), dst_type.scalar)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        if rounding_mode not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"the interpreter rounds to nearest even, not by {rounding_mode}")
        return TensorHandle(narrow(numbers(src), dst_type.scalar), dst_type.scalar)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        return _handle(op(numbers(lhs), numbers(rhs)), lhs.dtype.scalar)

    def unary_op(self, arg: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        return _handle(op(numbers(arg)), arg.dtype.scalar)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        """In float64, where the product of two fp32 is exact: rounded once (almost always) as by the hardware."""
        x64, y64, z64 = (numbers(handle).astype(np.float64) for handle in (x, y, z))
        return TensorHandle(narrow(x64 * y64 + z64, z.dtype.scalar), z.dtype.scalar)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any) -> TensorHandle:
        """In float64: in fp32 a row of numpy's product depends on where in the tile it stands."""
        product = np.matmul(numbers(a), numbers(b), dtype=np.float64)
        return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)  # of a number and NaN, the number

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)


def _tensors(bounds: Callable[..., range]) -> Callable[..., Iterator[Any]]:
    """tl.range: what runs through it is a tensor, as when compiled."""
    return lambda *args, **kwargs: map(interpreter.interpreter_semantic.to_tensor, bounds(*args, **kwargs))


def _bound(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """A function or method of the language, as the interpreter's semantics compute it."""
    computes = getattr(member, "__wrapped__", member)  # without the question whether a kernel calls it

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return computes(*args, **kwargs)

    return call


def _patch_language() -> None:
    """All of the language and for good, rather than anew for each launch."""
    scope = interpreter._LangPatchScope()
    for part in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(part, tl.core.is_builtin):
            setattr(part, name, _bound(member, interpreter.interpreter_semantic))
    interpreter._patch_lang_tensor(tl.tensor, scope)
    for module in (tl, tl.core):
        interpreter._patch_lang_core(module, scope)
        module.range = _tensors(module.range)
    tl.tensor.__index__ = lambda self: self.handle.data.item()  # int(array of one) is gone in numpy 2.4


# ------------------------------------------------------------------------------------------------ types, once each


@cache
def _dimensions(shape: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    """`numel` and `shape` of the tensors of that shape."""
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[tl.tuple, int]:
    """`shape` and `numel` of the types of such blocks."""
    return tl.tuple(shape), validate_block_shape(shape)


@cache
def _name(shape: tuple[int, ...], element: str) -> str:
    return f"<{shape}, {element}>"


def _init_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _dimensions(tuple(type.shape.values) if type.is_block() else ())


def _init_block(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[int | tl.constexpr]) -> None:
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel = _sizes(sizes)
    self.name = _name(sizes, element_ty.name)


_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast_others(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Both as they are where they have one shape: `_sizes` makes each once."""
    one, other = getattr(lhs.type, "shape", None), getattr(rhs.type, "shape", None)
    return (lhs, rhs) if one is other else _broadcast(self, lhs, rhs)


def _equal(self: tl.tuple, other: Iterable[Any]) -> tl.constexpr:
    return tl.constexpr(self.values == [each.value if isinstance(each, tl.constexpr) else each for each in other])


_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype[Any]] = {}


def _known_numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """A type's equal has its name; only some of them can be hashed."""
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _numpy_dtype(dtype)
    return _numpy_dtypes[name]


# --------------------------------------------------------------------------------------------------------- launches

_launch = interpreter.GridExecutor.__call__


def _quiet_launch(self: Any, *args: Any, **kwargs: Any) -> None:
    with np.errstate(all="ignore"):  # lanes that a mask leaves out compute too
        _launch(self, *args, **kwargs)


def enable() -> None:
    """Interpret all kernels of modules that are imported from now on."""
    triton.knobs.runtime.interpret = True
    for name, method in vars(Repairs).items():
        if not name.startswith("__"):
            setattr(interpreter.InterpreterBuilder, name, method)
    tl.tensor.__init__ = _init_tensor
    tl.block_type.__init__ = _init_block
    tl.tuple.__eq__ = _equal
    TritonSemantic.broadcast_impl_value = _broadcast_others
    tl.core._type_for_tuple_values = lambda values, fields=None: None  # that of a tuple is read by the compiler alone
    interpreter._get_np_dtype = _known_numpy_dtype
    # Nothing reads the checks of overflow, which take as long as the operations themselves.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_language()
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.GridExecutor.__call__ = _quiet_launch
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    # The functions of triton's own library were imported before, and wait to be compiled.
    interpreted = cache(interpreter.InterpretedFunction)
    JITFunction.__call__ = lambda self, *args, **kwargs: interpreted(self.fn)(*args, **kwargs)
