"""Save what a model is, from wherever it lies, in bounded memory: every output is known before the first byte."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overspill.checkpoint.index import FileSpan, SourceFile
from overspill.checkpoint.publishing import publish
from overspill.checkpoint.reader import FileReader
from overspill.checkpoint.rearranging import Rearrangement
from overspill.checkpoint.safetensors_header import DTYPES
from overspill.checkpoint.sharding import cut_into_files
from overspill.checkpoint.traced import as_they_are
from overspill.checkpoint.writer import SafetensorsWriter
from overspill.config import MIB, parse_size
from overspill.devices import CPU, buffer_of
from overspill.errors import CheckpointError, SaveError
from overspill.homes import DiskTensor, DiskValues, ordinary
from overspill.integrations.transformers import reverted
from overspill.managed import managers_of
from overspill.offloading import changing
from overspill.progress import Progress
from overspill.tensors import TensorGroup, TensorSpec, tensor_groups

_READ_AT_ONCE = 16 * MIB


@dataclass(frozen=True)
class Output:
    """One tensor of the checkpoint to be."""

    name: str
    made_of: Rearrangement
    tensors: Mapping[str, torch.Tensor]
    """The model's, by its names."""

    @property
    def spec(self) -> TensorSpec:
        return self.made_of.spec

    def spans(self) -> list[tuple[FileReader, FileSpan]] | None:
        """Where its bytes lie, if all of them are in files as they are to be written."""
        spans: list[tuple[FileReader, FileSpan]] = []
        size = self.spec.dtype.itemsize
        for run in self.made_of.runs if self.made_of.runs is not None else [None]:
            values = None if run is None else in_files(self.tensors[run.source])
            if run is None or values is None or not isinstance(values.reader, FileReader):
                return None
            reader = values.reader
            parts = values.spans_of(run.offset * size, (run.offset + run.numel) * size)
            spans += [(reader, span) for span in parts]
        return spans

    def values(self) -> torch.Tensor:
        """An ordinary tensor: the model's own where that will do."""
        whole = self._whole()
        if whole is not None:
            return ordinary(whole).reshape(self.spec.shape)
        values = torch.empty(self.spec.shape, dtype=self.spec.dtype)
        self.made_of.fill(values, self._elements)
        return values

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes in order, a few megabytes at a time."""
        whole = self._whole()
        if whole is None:
            for chunk in self.made_of.chunks(self._elements):
                yield buffer_of(chunk)
            return
        elements = _flat(whole)
        step = max(1, _READ_AT_ONCE // elements.element_size())
        for start in range(0, elements.numel(), step):
            part = elements[start : start + step].to(CPU)
            yield buffer_of(part)

    def _whole(self) -> torch.Tensor | None:
        """The tensor of the model that it is as it stands."""
        runs = self.made_of.runs
        if runs is None or len(runs) != 1:
            return None
        tensor = self.tensors[runs[0].source]
        return tensor if runs[0].numel == tensor.numel() else None

    def _elements(self, source: str, start: int, stop: int) -> torch.Tensor:
        values = in_files(self.tensors[source])
        return _flat(self.tensors[source])[start:stop] if values is None else values.elements(start, stop)


def in_files(tensor: torch.Tensor) -> DiskValues | None:
    """The values of a tensor that are in files, in order."""
    if not isinstance(tensor, DiskTensor):
        return None
    values = tensor._overspill_values
    return values if values.memory is None and values.spec.strides is None else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return ordinary(tensor).resolve_conj().resolve_neg().contiguous().view(-1)  # what is negated only when read


class StateDict(Mapping[str, torch.Tensor]):
    """The tensors that a save would write, by the names that it would give them. Each is read when it is asked for."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = {output.name: output for output in outputs}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._outputs[name].values()

    def __contains__(self, name: object) -> bool:
        return name in self._outputs  # Mapping's own would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def specs(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes, without reading anything."""
        return {name: output.spec for name, output in self._outputs.items()}


def outputs_of(model: nn.Module, *, original_format: bool) -> list[Output]:
    """The tensors of the model's checkpoint, in the form in which it was loaded, or in the model's own."""
    tensors = _saved_tensors(model)
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    made_of = reverted(model, specs) if original_format else as_they_are(specs)
    return [Output(name, rearrangement, tensors) for name, rearrangement in made_of.items()]


def _saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, ties once, by the names of the checkpoint that they were loaded from."""
    stored = {}
    for manager in managers_of(model):
        if manager.model is model:
            stored = manager.stored_as
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tensors = {}
    for group in tensor_groups(model).values():
        name = stored.get(id(group.tensor))
        if name not in group.names:  # a tensor put there since may have the id of one that is gone
            name = _first_name(model, group)
        if not group.persistent or name in ignored:
            continue
        if group.tensor.is_meta:
            raise SaveError(f"{group.name} is on the meta device and has no values. Load the model before saving it")
        _refuse_unstorable(name, group.tensor)
        tensors[name] = group.tensor
    return tensors


def _first_name(model: nn.Module, group: TensorGroup) -> str:
    """The name that a tie is stored by: not one that Transformers fills in from the other."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    return next((name for name in group.names if name not in tied), group.name)


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
    original_format: bool,
    metadata: Mapping[str, str] | None,
    progress: bool,
) -> None:
    """Write the model's checkpoint to `folder`."""
    limit = parse_size(max_shard_size, what="max_shard_size")
    with changing(model, "save a model"):
        outputs = {output.name: output for output in outputs_of(model, original_format=original_format)}
        specs = ((name, output.spec) for name, output in outputs.items())
        shards = cut_into_files(specs, limit, {"format": "pt", **(metadata or {})})
        total = sum(layout.nbytes for layout in shards)
        _open_files_of(model)
        with Progress(total, progress, "saving") as bar:
            save = _Save(outputs, bar)
            publish(Path(folder), shards, save.fill, save.follow)


class _Save:
    """One save: how each tensor is written, and where it lies afterwards."""

    def __init__(self, outputs: Mapping[str, Output], bar: Progress) -> None:
        self._outputs, self._bar = outputs, bar
        self._done = 0

    def fill(self, writer: SafetensorsWriter, name: str) -> None:
        output = self._outputs[name]
        spans = output.spans()
        if spans is None:
            writer.write(name, output.chunks())
        else:
            writer.copy(name, [(reader.descriptor(span.file), span.offset, span.nbytes) for reader, span in spans])
            for reader, file in dict.fromkeys((reader, span.file) for reader, span in spans):
                reader.descriptor(file)  # a change meanwhile is noticed too
        self._done += output.spec.nbytes
        self._bar.show(self._done)

    def follow(self, spots: Mapping[str, tuple[SourceFile, int]]) -> None:
        """Where the files of disk homes were replaced by the new ones, refer to those."""
        parts: dict[int, list[tuple[int, FileSpan]]] = {}
        homes: dict[int, DiskValues] = {}
        for name, (file, offset) in spots.items():
            output = self._outputs[name]
            size = output.spec.dtype.itemsize
            for position, run in output.made_of.stretches():
                values = in_files(output.tensors[run.source])
                if values is not None:
                    homes[id(values)] = values
                    parts.setdefault(id(values), []).append(
                        (run.offset * size, FileSpan(file, offset + position * size, run.numel * size))
                    )
        there = {file: _is_there(file) for values in homes.values() for file in {span.file for span in values.spans}}
        for key, values in homes.items():
            spans = _side_by_side(parts[key], values.spec.nbytes)
            if spans is not None and not all(there[span.file] for span in values.spans):
                values.spans = spans


def _open_files_of(model: nn.Module) -> None:
    """Have every file open that a unit reads, so that one that this replaces is read on.

    A unit brings all that it was planned with, also what is not saved: parameters that others were put in the place of.
    """
    homes = (home for manager in managers_of(model) for unit in manager.units.values() for home in unit.store.homes)
    for values in (home._overspill_values for home in homes if isinstance(home, DiskTensor)):
        if values.memory is None and isinstance(values.reader, FileReader):
            for span in values.spans:
                with suppress(CheckpointError):  # for whoever needs it
                    values.reader.descriptor(span.file)


def _side_by_side(parts: list[tuple[int, FileSpan]], nbytes: int) -> tuple[FileSpan, ...] | None:
    """The spans in the order of where they belong, if they are all of `nbytes` without gaps."""
    reached, spans = 0, []
    for start, span in sorted(parts, key=lambda part: part[0]):
        if start != reached:
            return None
        reached += span.nbytes
        spans.append(span)
    return tuple(spans) if reached == nbytes else None


def _is_there(file: SourceFile) -> bool:
    try:
        return SourceFile.at(file.path) == file
    except OSError:
        return False


def _refuse_unstorable(name: str, tensor: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor):
        raise SaveError(
            f"{name} is a {type(tensor).__name__}, a tensor around others, and only its own library knows how to store "
            "it. Save the model with that, before it is offloaded"
        )
    kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
    if kind is not tensor.dtype or kind not in DTYPES.values():
        raise SaveError(
            f"{name} is {str(kind).removeprefix('torch.')}, which safetensors files cannot hold. "
            "Store it in another form, or keep it out of the model's state: register_buffer(persistent=False)"
        )
