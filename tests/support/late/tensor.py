"""Tensors of a late device: their places are there when a call returns, their values later."""

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.late.engine import Allocation, engine


class HostRead(AssertionError):
    """The host reads memory of the device without asking for a copy."""


class LateTensor(torch.Tensor):
    """A tensor of the device. `near` is its memory, which only the device's own work may touch."""

    near: Tensor
    allocation: Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor, allocation: Allocation) -> "LateTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device="late:0"
        )  # fmt: skip
        made.near, made.allocation = near, allocation
        return made

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise HostRead("numpy() of a tensor of the device")

    def tolist(self) -> Any:
        raise HostRead("tolist() of a tensor of the device")

    def __repr__(self) -> str:
        return f"LateTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name
        if name in _HOST_READS:
            if not may_wait.get():
                raise HostRead(f"{name} needs a value of the device on the host")
            engine().current().record().synchronize()
            return func(*near(args), **near(kwargs))
        if name.startswith("torch_attn::"):
            raise RuntimeError(f"{name}: no kernel of this device")
        if name == "aten::copy_":
            return _copy(*args, **kwargs)
        if name == "aten::_to_copy":
            return _to_copy(*args, **kwargs)
        if func.is_view:
            return tree_map(functools.partial(_wrap, _allocation_of(args)), func(*near(args), **near(kwargs)))
        return _compute(func, args, kwargs)


may_wait = ContextVar("may_wait", default=False)
"""Whether the host may ask for a value, and waits for it as CUDA does."""
_HOST_READS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero"}


def near(values: Any) -> Any:
    return tree_map(lambda value: value.near if isinstance(value, LateTensor) else value, values)


def _wrap(allocation: Allocation, value: Any) -> Any:
    return LateTensor(value, allocation) if isinstance(value, Tensor) else value


def _allocation_of(args: Sequence[Any]) -> Allocation:
    return next(arg.allocation for arg in args if isinstance(arg, LateTensor))


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> LateTensor:
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
    allocation = engine().allocate(extent * dtype.itemsize)
    flat = allocation.memory[: extent * dtype.itemsize].view(dtype)
    return LateTensor(flat.as_strided(size, stride), allocation)


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """As CUDA copies: only between pinned memory and the device does the host go on, and only if it may."""
    late = engine()
    host = [tensor for tensor in (into, source) if not isinstance(tensor, LateTensor)]
    goes_on = not host or (non_blocking and late.pinned.holds(host[0]))
    place, read = near(into), near(source)
    if into.dtype != source.dtype or not (into.is_contiguous() and source.is_contiguous()):
        late.load(f"aten.copy_ of {into.dtype}, {source.dtype}")
    if not isinstance(source, LateTensor) and not goes_on:
        read = source.clone()  # pageable memory has been read when the call returns
    late.submit(lambda: place.copy_(read))
    if not goes_on and not isinstance(into, LateTensor):
        late.current().record().synchronize()
    return into


def _to_copy(source: Tensor, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
    device = torch.device(device) if device is not None else source.device
    dtype = dtype or source.dtype
    if device.type == "cpu":
        return _copy(torch.empty(source.shape, dtype=dtype), source)
    meta = torch.empty_strided(source.shape, source.stride(), device="meta", dtype=dtype)
    made = torch.empty_like(meta)
    return _copy(_empty(made.shape, made.stride(), dtype), source, non_blocking)


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Anything else: the result's place now, the result later."""

    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and not isinstance(value, LateTensor) and value.dim():
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    near_args, near_kwargs = near(tuple(args)), _on("cpu", near(kwargs))
    dtypes = {str(value.dtype) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
    engine().load(f"{func} of {', '.join(sorted(dtypes))}")
    if func._schema.is_mutable:
        engine().submit(lambda: func(*near_args, **near_kwargs))
        if not func._schema.returns:
            return None
        written = [
            a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
        ]
        named = [kwargs[s.name] for s in func._schema.arguments if s.name in kwargs and s.alias_info]
        return [*written, *named][0] if len(written) + len(named) == 1 else (*written, *named)
    shapes = func(*tree_map(_as_meta, tuple(args)), **_on("meta", tree_map(_as_meta, kwargs)))
    made = tree_map(lambda value: _empty(value.shape, value.stride(), value.dtype), shapes)
    places = [value.near for value in tree_leaves(made)]

    def run() -> None:
        results = tree_leaves(func(*near_args, **near_kwargs))
        for place, result in zip(places, results, strict=True):
            place.copy_(result)

    engine().submit(run)
    return made


def _as_meta(value: Any) -> Any:
    if isinstance(value, LateTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _on(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device(device)} if "device" in kwargs else kwargs


def make_empty(size: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
    made = torch.empty(size, device="meta", dtype=dtype)
    return _empty(made.shape, made.stride(), made.dtype)


def make_empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
    return _empty(size, stride, dtype or torch.get_default_dtype())
