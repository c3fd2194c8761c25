"""Save what a model is, from wherever it lies, in bounded memory: every output is known before the first byte."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.publishing import publish
from overspill.checkpoint.reader import FileReader
from overspill.checkpoint.safetensors_header import DTYPES
from overspill.checkpoint.writer import FileLayout, SafetensorsWriter, by_alignment, lay_out
from overspill.config import MIB, parse_size
from overspill.devices import CPU, buffer_of
from overspill.errors import CheckpointError, SaveError
from overspill.homes import DiskTensor, DiskValues, FileSpan
from overspill.managed import managers_of
from overspill.offloading import changing
from overspill.progress import Progress
from overspill.tensors import TensorGroup, TensorSpec, tensor_groups

_READ_AT_ONCE = 16 * MIB


@dataclass(frozen=True)
class Output:
    """One tensor of the checkpoint to be."""

    name: str
    tensor: torch.Tensor

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec.of(self.tensor)

    @property
    def on_disk(self) -> DiskValues | None:
        """Its values, if they are in files as they are to be written."""
        if not isinstance(self.tensor, DiskTensor):
            return None
        values = self.tensor._overspill_values
        return values if values.memory is None and values.spec.strides is None else None

    def values(self) -> torch.Tensor:
        """An ordinary tensor: the model's own where that will do."""
        if isinstance(self.tensor, DiskTensor):
            return self.tensor._overspill_values.read()
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor.detach()

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes in order, a few megabytes at a time."""
        elements = self.values().resolve_conj().resolve_neg().contiguous().view(-1)  # what is negated only when read
        step = max(1, _READ_AT_ONCE // elements.element_size())
        for start in range(0, elements.numel(), step):
            part = elements[start : start + step].to(CPU)
            yield buffer_of(part)


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


def outputs_of(model: nn.Module) -> list[Output]:
    """Parameters and persistent buffers, ties once, by the names of the checkpoint that they were loaded from."""
    stored = {}
    for manager in managers_of(model):
        if manager.model is model:
            stored = manager.stored_as
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    outputs = []
    for group in tensor_groups(model).values():
        name = stored.get(id(group.tensor))
        if name not in group.names:  # a tensor put there since may have the id of one that is gone
            name = _first_name(model, group)
        if not group.persistent or name in ignored:
            continue
        if group.tensor.is_meta:
            raise SaveError(f"{group.name} is on the meta device and has no values. Load the model before saving it")
        outputs.append(Output(name, group.tensor))
    return outputs


def _first_name(model: nn.Module, group: TensorGroup) -> str:
    """The name that a tie is stored by: not one that Transformers fills in from the other."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    return next((name for name in group.names if name not in tied), group.name)


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
    metadata: Mapping[str, str] | None,
    progress: bool,
) -> None:
    """Write the model's checkpoint to `folder`."""
    limit = parse_size(max_shard_size, what="max_shard_size")
    with changing(model, "save a model"):
        outputs = {output.name: output for output in outputs_of(model)}
        shards = _shards(list(outputs.values()), limit, {"format": "pt", **(metadata or {})})
        total = sum(layout.nbytes for layout in shards)
        _open_files_of(model)
        with Progress(total, progress, "saving") as bar:
            save = _Save(outputs, bar)
            spots = publish(Path(folder), shards, save.fill)
        save.follow(spots)


class _Save:
    """One save: how each tensor is written, and where it lies afterwards."""

    def __init__(self, outputs: Mapping[str, Output], bar: Progress) -> None:
        self._outputs, self._bar = outputs, bar
        self._done = 0

    def fill(self, writer: SafetensorsWriter, name: str) -> None:
        output = self._outputs[name]
        values = output.on_disk
        if values is not None and isinstance(values.reader, FileReader) and len({s.file for s in values.spans}) == 1:
            file = values.spans[0].file
            writer.copy(name, values.reader.descriptor(file), [(span.offset, span.nbytes) for span in values.spans])
            values.reader.descriptor(file)  # a change meanwhile is noticed too
        else:
            writer.write(name, output.chunks())
        self._done += output.spec.nbytes
        self._bar.show(self._done)

    def follow(self, spots: Mapping[str, tuple[SourceFile, int]]) -> None:
        """Where the files of disk homes were replaced by the new ones, refer to those."""
        for name, (file, offset) in spots.items():
            values = self._outputs[name].on_disk
            if values is not None and any(not _is_there(span.file) for span in values.spans):
                values.spans = (FileSpan(file, offset, values.spec.nbytes),)


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


def _is_there(file: SourceFile) -> bool:
    try:
        return SourceFile.at(file.path) == file
    except OSError:
        return False


def _shards(outputs: Sequence[Output], limit: int, metadata: Mapping[str, str]) -> list[FileLayout]:
    """The files, each of at most `limit` bytes of tensors, unless a single tensor is larger: that has its own."""
    parts: list[list[tuple[str, TensorSpec]]] = [[]]
    size = 0
    for output in outputs:
        _refuse_unstorable(output)
        if parts[-1] and size + output.spec.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append((output.name, output.spec))
        size += output.spec.nbytes
    return [lay_out(by_alignment(part), metadata) for part in parts]


def _refuse_unstorable(output: Output) -> None:
    kind = output.spec.dtype if output.tensor.layout is torch.strided else output.tensor.layout
    if kind is not output.spec.dtype or kind not in DTYPES.values():
        raise SaveError(
            f"{output.name} is {str(kind).removeprefix('torch.')}, which safetensors files cannot hold. "
            "Store it in another form, or keep it out of the model's state: register_buffer(persistent=False)"
        )
