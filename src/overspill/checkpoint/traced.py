"""Tensors without values that remember where each element comes from: a conversion is run on them, and nothing is read.

What comes out says which bytes to read. So the conversions themselves stay where they are written; whatever computes
new values instead of moving old ones is refused by name.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from overspill.checkpoint.rearranging import Box, Rearrangement, Shape, row_major
from overspill.tensors import TensorSpec

aten = torch.ops.aten

_MOST_BOXES = 1 << 16


class NotARearrangementError(Exception):
    """An operation that does more than to move elements."""


def as_they_are(specs: Mapping[str, TensorSpec]) -> dict[str, Rearrangement]:
    """Tensors that are made of nothing but themselves."""
    return {name: Traced.source(name, spec).rearrangement() for name, spec in specs.items()}


class Traced(torch.Tensor):
    """A tensor without values that remembers where each element comes from."""

    _boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box]) -> "Traced":
        if len(boxes) > _MOST_BOXES:
            raise NotARearrangementError(f"it would be made of more than {_MOST_BOXES} blocks")
        traced: Traced = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        traced._boxes = tuple(box for box in boxes if box.numel)  # an empty one may lie beyond its source
        return traced

    @classmethod
    def source(cls, name: str, spec: TensorSpec) -> "Traced":
        """A tensor that everything else is made of."""
        start = (0,) * len(spec.shape)
        return cls(spec.shape, spec.dtype, [Box(start, spec.shape, name, 0, tuple(row_major(spec.shape)))])

    def rearrangement(self) -> Rearrangement:
        return Rearrangement(TensorSpec.of(self), self._boxes)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's reads values
        return f"Traced({TensorSpec.of(self)} of {len(self._boxes)} boxes)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub leaves out func
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            return rule(*args, **kwargs)
        made_of_others = func.decompose(*args, **kwargs)  # under inference_mode torch has not done that yet
        if made_of_others is NotImplemented:
            names = {
                box.source for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Traced) for box in leaf._boxes
            }
            raise NotARearrangementError(
                f"{func} of {', '.join(sorted(names)[:3])} computes values, or its effect on them is not known"
            )
        return made_of_others


def _same(tensor: Traced, **_: Any) -> Traced:
    return Traced(tensor.shape, tensor.dtype, tensor._boxes)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    if not all(isinstance(tensor, Traced) for tensor in tensors):
        raise NotARearrangementError("it joins stored values with others")
    if len({tensor.dtype for tensor in tensors}) != 1:
        raise NotARearrangementError(f"it joins {_listed(tensors)}")
    dim %= tensors[0].ndim
    if len({(*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :]) for tensor in tensors}) != 1:
        raise RuntimeError(f"{_listed(tensors)} cannot be joined along dimension {dim}")
    boxes: list[Box] = []
    end = 0
    for tensor in tensors:
        boxes += (
            box.with_dimension(dim, box.start[dim] + end, box.shape[dim], box.strides[dim]) for box in tensor._boxes
        )
        end += tensor.shape[dim]
    shape = list(tensors[0].shape)
    shape[dim] = end
    return Traced(shape, tensors[0].dtype, boxes)


def _listed(tensors: Sequence[torch.Tensor]) -> str:
    return " and ".join(dict.fromkeys(str(TensorSpec.of(tensor)) for tensor in tensors))  # of hundreds most are alike


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    if len({tensor.shape for tensor in tensors}) != 1:
        raise RuntimeError(f"{_listed(tensors)} cannot be stacked")
    dim %= tensors[0].ndim + 1
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _slice(tensor: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Traced:
    dim %= tensor.ndim
    start, stop, step = slice(start, end, step).indices(tensor.shape[dim])
    shape = list(tensor.shape)
    shape[dim] = len(range(start, stop, step))
    boxes = (box.clipped(dim, start, stop, step) for box in tensor._boxes)
    return Traced(shape, tensor.dtype, [box for box in boxes if box is not None])


def _select(tensor: Traced, dim: int, index: int) -> Traced:
    index %= tensor.shape[dim]
    return _squeeze(_slice(tensor, dim, index, index + 1), [dim])


def _unbind(tensor: Traced, dim: int = 0) -> list[Traced]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split_with_sizes(tensor: Traced, sizes: Sequence[int], dim: int = 0) -> list[Traced]:
    if sum(sizes) != tensor.shape[dim]:
        raise RuntimeError(f"{TensorSpec.of(tensor)} cannot be split into {list(sizes)} along dimension {dim}")
    ends = list(itertools.accumulate(sizes))
    return [_slice(tensor, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _split(tensor: Traced, size: int, dim: int = 0) -> list[Traced]:
    total = tensor.shape[dim]
    return [_slice(tensor, dim, start, min(start + size, total)) for start in range(0, max(total, 1), size)]


def _permute(tensor: Traced, dims: Sequence[int]) -> Traced:
    dims = [dim % tensor.ndim for dim in dims]
    return Traced([tensor.shape[dim] for dim in dims], tensor.dtype, [box.permuted(dims) for box in tensor._boxes])


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Traced:
    dims = list(range(tensor.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(tensor, dims)


def _t(tensor: Traced) -> Traced:
    return _transpose(tensor, 0, 1) if tensor.ndim == 2 else _same(tensor)


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    dim %= tensor.ndim + 1
    shape = [*tensor.shape[:dim], 1, *tensor.shape[dim:]]
    boxes = [
        Box(
            (*box.start[:dim], 0, *box.start[dim:]),
            (*box.shape[:dim], 1, *box.shape[dim:]),
            box.source,
            box.offset,
            (*box.strides[:dim], 0, *box.strides[dim:]),
        )
        for box in tensor._boxes
    ]
    return Traced(shape, tensor.dtype, boxes)


def _squeeze(tensor: Traced, dims: Sequence[int] | int | None = None) -> Traced:
    if dims is None:
        dims = range(tensor.ndim)
    wanted = {dim % tensor.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
    kept = [dim for dim in range(tensor.ndim) if dim not in wanted or tensor.shape[dim] != 1]
    boxes = [box.permuted(kept) for box in tensor._boxes]
    return Traced([tensor.shape[dim] for dim in kept], tensor.dtype, boxes)


def _view(tensor: Traced, shape: Sequence[int]) -> Traced:
    """Another shape over the same order: dimensions are joined and cut until they are the ones that are wanted."""
    wanted = _with_inferred(shape, tensor.numel())
    if math.prod(wanted) != tensor.numel():
        raise RuntimeError(f"{TensorSpec.of(tensor)} cannot have the shape {list(shape)}")
    if tensor.numel() == 0:
        return Traced(wanted, tensor.dtype, [])
    narrowed = _squeeze(tensor)
    have, boxes = list(narrowed.shape), list(narrowed._boxes)
    for dim, size in enumerate(size for size in wanted if size != 1):
        while have[dim] % size:
            boxes = [part for box in boxes for part in _merged(box, dim, have[dim + 1])]
            have[dim : dim + 2] = [have[dim] * have[dim + 1]]
        if have[dim] > size:
            boxes = [part for box in boxes for part in _cut(box, dim, have[dim] // size)]
            have[dim : dim + 1] = [size, have[dim] // size]
        if len(boxes) > _MOST_BOXES:
            raise NotARearrangementError(f"it would be made of more than {_MOST_BOXES} blocks")
    result = Traced(have, tensor.dtype, boxes)
    for dim, size in enumerate(wanted):
        result = _unsqueeze(result, dim) if size == 1 else result
    return result


def _with_inferred(shape: Sequence[int], numel: int) -> Shape:
    known = math.prod(size for size in shape if size != -1)
    return tuple(numel // max(known, 1) if size == -1 else size for size in shape)


def _cut(box: Box, dim: int, inner: int) -> list[Box]:
    """A dimension in two, the second of `inner` elements. A box that ends inside a row of those becomes several."""
    start, size, stride = box.start[dim], box.shape[dim], box.strides[dim]
    first, last = start // inner, (start + size - 1) // inner
    if start % inner == 0 and size % inner == 0:
        return [_in_two(box, dim, (first, size // inner, inner * stride), (0, inner, stride), 0)]
    rows = {first: [start, min(start + size, (first + 1) * inner)], last: [max(start, last * inner), start + size]}
    if last - first > 1:
        rows[first + 1] = [(first + 1) * inner, last * inner]
    parts = []
    for row, (low, high) in sorted(rows.items()):
        across = (row, -(-(high - row * inner) // inner), inner * stride)
        along = (low - row * inner, min(high - low, inner), stride)
        parts.append(_in_two(box, dim, across, along, (low - start) * stride))
    return parts


def _in_two(box: Box, dim: int, across: tuple[int, int, int], along: tuple[int, int, int], offset: int) -> Box:
    """A box with two dimensions, each (start, size, stride), in the place of one."""
    start, shape, strides = (
        (*values[:dim], outer, inner, *values[dim + 1 :])
        for values, outer, inner in zip((box.start, box.shape, box.strides), across, along, strict=True)
    )
    return Box(start, shape, box.source, box.offset + offset, strides)


def _merged(box: Box, dim: int, inner: int) -> list[Box]:
    """A dimension and the next, of `inner` elements, as one. Where they are no even steps together, row by row."""
    (outer_start, start), (rows, size) = box.start[dim : dim + 2], box.shape[dim : dim + 2]
    outer_stride, stride = box.strides[dim : dim + 2]
    joined = box.without_dimension(dim + 1)
    if rows == 1 or (size == inner and (outer_stride == inner * stride)):
        return [joined.with_dimension(dim, outer_start * inner + start, rows * size, stride)]
    return [
        joined.with_dimension(dim, (outer_start + row) * inner + start, size, stride, row * outer_stride)
        for row in range(rows)
    ]


_RULES: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
