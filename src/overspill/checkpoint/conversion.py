"""Tensors that a model has in another form than its checkpoint: fused, split, transposed. What to read for each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from overspill.checkpoint.index import FileSpan, SourceFile, StoredTensor
from overspill.checkpoint.reader import RangeReader
from overspill.checkpoint.rearranging import Elements, Rearrangement
from overspill.config import MIB
from overspill.devices import buffer_of
from overspill.tensors import TensorSpec

_READ_AT_ONCE = 16 * MIB


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor made of others that are stored."""

    name: str
    made_of: Rearrangement
    stored: Mapping[str, StoredTensor]

    @property
    def spec(self) -> TensorSpec:
        return self.made_of.spec

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(dict.fromkeys(self.stored[source].file for source in self.made_of.sources))

    @cached_property
    def spans(self) -> tuple[FileSpan, ...] | None:
        """Its bytes where they lie, gathered in order. None if that would be too many small reads."""
        if self.made_of.runs is None:
            return None
        size = self.spec.dtype.itemsize
        return tuple(
            self.stored[run.source].spans[0].part(run.offset * size, (run.offset + run.numel) * size)
            for run in self.made_of.runs
        )

    def fill(self, target: torch.Tensor, reader: RangeReader) -> None:
        """Read all of it into `target`, on whatever device and in whatever dtype that is."""
        self.made_of.fill(target, self._elements(reader))

    def chunks(self, reader: RangeReader) -> Iterator[torch.Tensor]:
        """Its elements in order, a few megabytes at a time."""
        return self.made_of.chunks(self._elements(reader))

    def _elements(self, reader: RangeReader) -> Elements:
        def read(source: str, start: int, stop: int) -> torch.Tensor:
            stored = self.stored[source]
            values = torch.empty(stop - start, dtype=stored.spec.dtype)
            reader.read(stored.file, stored.offset + start * values.itemsize, buffer_of(values))
            return values

        return read


Stored = StoredTensor | ConvertedTensor


def chunks_of(stored: Stored, reader: RangeReader) -> Iterator[torch.Tensor]:
    """The elements of a tensor in order, flat, a few megabytes at a time."""
    if isinstance(stored, ConvertedTensor):
        yield from stored.chunks(reader)
        return
    step = _READ_AT_ONCE // stored.spec.dtype.itemsize
    for start in range(0, stored.spec.numel, step):
        part = torch.empty(min(step, stored.spec.numel - start), dtype=stored.spec.dtype)
        reader.read(stored.file, stored.offset + start * part.itemsize, buffer_of(part))
        yield part
