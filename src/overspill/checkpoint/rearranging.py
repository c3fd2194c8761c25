"""Tensors that are other tensors' elements in another order: fused experts, split projections, transposes.

A conversion is run once, on tensors without values that remember where each element would come from. What comes out of
it says which bytes to read, and nothing was read. So the conversions themselves stay where they are written; whatever
computes new values instead of moving old ones is refused by name.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from overspill.config import MIB
from overspill.tensors import TensorSpec

aten = torch.ops.aten

_FEW_RUNS = 64
_LONG_RUN = MIB // 4
"""A tensor is gathered run by run where its runs are few, or as long as this on average: a read has its price."""

_MOST_BOXES = 1 << 16
_READ_AT_ONCE = 8 * MIB  # the allocator keeps several blocks of this size

Shape = tuple[int, ...]


class NotARearrangementError(Exception):
    """An operation that does more than to move elements."""


@dataclass(frozen=True)
class Box:
    """A block of a tensor, whose element [i, j, …] is element `offset + i * strides[0] + j * strides[1] …` of a source.

    `start` is where in the tensor the block lies.
    """

    start: Shape
    shape: Shape
    source: str
    offset: int
    strides: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Behind the last element of the source that is used."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1

    def with_dimension(self, dim: int, start: int, size: int, stride: int, offset: int = 0) -> "Box":
        """The same but for one dimension, and `offset` elements further on in the source."""
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.shape[:dim], size, *self.shape[dim + 1 :]),
            self.source,
            self.offset + offset,
            (*self.strides[:dim], stride, *self.strides[dim + 1 :]),
        )

    def without_dimension(self, dim: int) -> "Box":
        return self.permuted([index for index in range(len(self.shape)) if index != dim])

    def permuted(self, dims: Sequence[int]) -> "Box":
        def moved(values: Shape) -> Shape:
            return tuple(values[dim] for dim in dims)

        return Box(moved(self.start), moved(self.shape), self.source, self.offset, moved(self.strides))

    def clipped(self, dim: int, start: int, stop: int, step: int = 1) -> "Box | None":
        """What is left of it in every `step`th of the indices from `start` to `stop`, counted from there."""
        first = max(0, -(-(self.start[dim] - start) // step))
        end = min(stop, self.start[dim] + self.shape[dim])
        count = -(-(end - start - first * step) // step)
        if count <= 0:
            return None
        skipped = start + first * step - self.start[dim]
        stride = self.strides[dim]
        return self.with_dimension(dim, first, count, stride * step, skipped * stride)


@dataclass(frozen=True)
class Run:
    """Elements that lie side by side in a source and in the tensor made of it."""

    source: str
    offset: int
    numel: int


Elements = Callable[[str, int, int], torch.Tensor]
"""Reads a source: its elements from one index to another, flat."""


@dataclass(frozen=True)
class Rearrangement:
    """What a tensor is made of."""

    spec: TensorSpec
    boxes: tuple[Box, ...]

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(box.source for box in self.boxes))

    @cached_property
    def runs(self) -> list[Run] | None:
        """The tensor as stretches of its sources, in order. None if they are many and short."""
        most = max(_FEW_RUNS, self.spec.nbytes // _LONG_RUN)
        lengths = [_run_length(box, self.spec.shape) for box in self.boxes]
        if sum(box.numel // length for box, length in zip(self.boxes, lengths, strict=True) if length) > most:
            return None
        found = [run for box, length in zip(self.boxes, lengths, strict=True) for run in _runs(box, length, self.spec)]
        return _joined(sorted(found, key=lambda run: run[0]), self.spec)

    def stretches(self) -> Iterator[tuple[int, Run]]:
        """Runs with their positions: all of them, or those of blocks that are one run, where there are too many."""
        if self.runs is not None:
            yield from zip(itertools.accumulate((run.numel for run in self.runs), initial=0), self.runs, strict=False)
            return
        for box in self.boxes:
            if _run_length(box, self.spec.shape) == box.numel:
                yield from _runs(box, box.numel, self.spec)

    def part(self, dim: int, start: int, stop: int) -> "Rearrangement":
        """A part of it along one dimension."""
        shape = self.spec.shape
        spec = TensorSpec((*shape[:dim], stop - start, *shape[dim + 1 :]), self.spec.dtype)
        boxes = (box.clipped(dim, start, stop) for box in self.boxes)
        return Rearrangement(spec, tuple(box for box in boxes if box is not None))

    def fill(self, target: torch.Tensor, elements: Elements) -> None:
        """Copy all of it to `target`. Reads a few megabytes at a time, and what boxes share once."""
        itemsize = self.spec.dtype.itemsize
        for boxes in _read_together(list(self._small_boxes()), _READ_AT_ONCE // itemsize):
            low, high = min(box.offset for box in boxes), max(box.end for box in boxes)
            values = elements(boxes[0].source, low, high)
            for box in boxes:
                view = values.as_strided(box.shape, box.strides, values.storage_offset() + box.offset - low)
                _region(target, box).copy_(view)
            del values, view  # or they would live on while the next ones are read

    def chunks(self, elements: Elements) -> Iterator[torch.Tensor]:
        """All of it in order, flat, a few megabytes at a time."""
        for part in self._in_order():
            values = torch.empty(part.spec.shape, dtype=part.spec.dtype)
            part.fill(values, elements)
            yield values.view(-1)
            del values

    def _in_order(self, dim: int = 0) -> Iterator["Rearrangement"]:
        """Parts that lie one after the other: some rows, or some rows of one row where that is large."""
        nbytes = self.spec.nbytes
        if nbytes == 0:
            return
        if nbytes <= _READ_AT_ONCE or dim == len(self.spec.shape):
            yield self
            return
        size = self.spec.shape[dim]
        step = max(1, _READ_AT_ONCE * size // nbytes)
        for start in range(0, size, step):
            yield from self.part(dim, start, min(start + step, size))._in_order(dim + 1)

    def _small_boxes(self) -> Iterator[Box]:
        most = _READ_AT_ONCE // self.spec.dtype.itemsize
        waiting = list(self.boxes)
        while waiting:
            box = waiting.pop()
            if box.end - box.offset <= most or box.numel == 1:
                yield box
                continue
            dim = max((d for d in range(len(box.shape)) if box.shape[d] > 1), key=lambda d: box.strides[d])
            half = box.start[dim] + box.shape[dim] // 2
            for start, stop in ((box.start[dim], half), (half, box.start[dim] + box.shape[dim])):
                part = box.clipped(dim, start, stop)
                assert part is not None
                waiting.append(part.with_dimension(dim, start, part.shape[dim], part.strides[dim]))


def as_they_are(specs: Mapping[str, TensorSpec]) -> dict[str, Rearrangement]:
    """Tensors that are made of nothing but themselves."""
    return {name: Traced.source(name, spec).rearrangement() for name, spec in specs.items()}


def _region(target: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
        target = target.narrow(dim, start, size)
    return target


def _read_together(boxes: list[Box], most: int) -> Iterator[list[Box]]:
    """Boxes of one source whose elements lie among or behind each other, as long as they span no more than `most`."""
    together: list[Box] = []
    low, high = 0, 0
    for box in sorted(boxes, key=lambda box: (box.source, box.offset)):
        joins = together and box.source == together[0].source and box.offset <= high and box.end - low <= most
        if together and not joins:
            yield together
            together = []
        if not together:
            low, high = box.offset, box.end
        together.append(box)
        high = max(high, box.end)
    if together:
        yield together


def _row_major(shape: Shape) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _run_length(box: Box, shape: Shape) -> int:
    """How many elements at a time lie side by side, both in the source and in the tensor."""
    length = 1
    for size, ours, theirs in zip(box.shape[::-1], _row_major(shape)[::-1], box.strides[::-1], strict=True):
        if size == 1:
            continue
        if ours != length or theirs != length:
            break
        length *= size
    return length if box.numel else 0


def _runs(box: Box, length: int, spec: TensorSpec) -> Iterator[tuple[int, Run]]:
    """The runs of a box, each with its position in the tensor."""
    if box.numel == 0:
        return
    ours = _row_major(spec.shape)
    first = sum(start * stride for start, stride in zip(box.start, ours, strict=True))
    outer, covered = len(box.shape), 1
    while covered < length:
        outer -= 1
        covered *= box.shape[outer]
    for index in itertools.product(*(range(size) for size in box.shape[:outer])):
        position = first + sum(i * stride for i, stride in zip(index, ours, strict=False))
        offset = box.offset + sum(i * stride for i, stride in zip(index, box.strides, strict=False))
        yield position, Run(box.source, offset, length)


def _joined(placed: list[tuple[int, Run]], spec: TensorSpec) -> list[Run]:
    runs: list[Run] = []
    reached = 0
    for position, run in placed:
        assert position == reached, f"element {reached} of {spec} is made of none or two"
        reached += run.numel
        last = runs[-1] if runs else None
        if last is not None and last.source == run.source and last.offset + last.numel == run.offset:
            runs[-1] = replace(last, numel=last.numel + run.numel)
        else:
            runs.append(run)
    assert reached == spec.numel, f"{spec} has {spec.numel} elements, not {reached}"
    return runs


# ---------------------------------------------------------------- tensors that remember where they come from


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
        return cls(spec.shape, spec.dtype, [Box(start, spec.shape, name, 0, tuple(_row_major(spec.shape)))])

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
