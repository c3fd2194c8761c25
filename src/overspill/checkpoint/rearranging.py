"""Tensors that are other tensors' elements in another order: what to read for one, and how to put it together."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from overspill.config import MIB
from overspill.tensors import TensorSpec

_FEW_RUNS = 64
_LONG_RUN = MIB // 4
"""A tensor is gathered run by run where its runs are few, or as long as this on average: a read has its price."""

_READ_AT_ONCE = 8 * MIB  # the allocator keeps several blocks of this size

Shape = tuple[int, ...]


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


def row_major(shape: Shape) -> list[int]:
    """The strides of a tensor whose elements lie in order."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _run_length(box: Box, shape: Shape) -> int:
    """How many elements at a time lie side by side, both in the source and in the tensor."""
    length = 1
    for size, ours, theirs in zip(box.shape[::-1], row_major(shape)[::-1], box.strides[::-1], strict=True):
        if size == 1:
            continue
        if ours != length or theirs != length:
            break
        length *= size
    return length if box.numel else 0


def _runs(box: Box, length: int, spec: TensorSpec) -> Iterator[tuple[int, Run]]:
    """The runs of a box, each with its position in the tensor."""
    ours = row_major(spec.shape)
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
