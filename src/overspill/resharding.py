"""A checkpoint made anew in other files or another dtype, straight from its bytes: no model, and memory for a chunk."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from overspill.checkpoint.conversion import chunks_of
from overspill.checkpoint.index import CheckpointIndex, SourceFile, StoredTensor, open_checkpoint
from overspill.checkpoint.publishing import publish
from overspill.checkpoint.reader import FileReader
from overspill.checkpoint.safetensors_header import parse_json_object
from overspill.checkpoint.sharding import cut_into_files
from overspill.checkpoint.writer import SafetensorsWriter
from overspill.companions import Companions
from overspill.config import MIB, parse_size
from overspill.devices import buffer_of
from overspill.errors import SaveError
from overspill.progress import Progress
from overspill.tensors import TensorSpec

logger = logging.getLogger(__name__)

_PIECE = 64 * MIB  # copied between two looks at whether to go on
_LENGTH_FIELD = 8

GoOn = Callable[[], None]
"""Called between pieces, while the new checkpoint is still aside: what it raises ends the work without a trace."""


@dataclass(frozen=True)
class Resharded:
    """What was written."""

    folder: Path
    files: int
    tensors: int
    nbytes: int
    """Of the tensors."""
    cast: int
    """How many tensors have another dtype now."""
    overflowed: tuple[str, ...]
    """Tensors with finite values that are infinite in the new dtype."""
    copied: tuple[str, ...]
    """Other files of the folder, which went along."""
    left_out: tuple[str, ...]
    """Weights of other formats and trainers' states, which did not."""


def reshard(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    progress: bool = True,
    go_on: GoOn = lambda: None,
) -> Resharded:
    """Write the checkpoint at `source` to `folder`, in shards of `max_shard_size`, floating-point tensors as `dtype`.

    Bytes that stay as they are are copied inside the kernel. Where `source` is a folder, its config, tokenizer and so
    on go along, and the config names the new dtype. The checkpoint that is in `folder`, which may be the source, stays
    whole until the new one stands.
    """
    index, target = open_checkpoint(source), Path(folder)
    if not index:
        raise SaveError(f"{source} holds no tensors, so there is nothing to save. Give another checkpoint")
    companions = Companions(index.path if index.path.is_dir() else None, target, dtype, weights=index.files)
    reader = FileReader()
    stored = {tensor.name: tensor for tensor in sorted(index.values(), key=_place)}
    specs = {name: tensor.spec.cast(dtype) for name, tensor in stored.items()}
    limit = parse_size(max_shard_size, what="max_shard_size")
    layouts = cut_into_files(specs.items(), limit, {"format": "pt", **_metadata(index, reader)})
    made = _missing_folders(target)
    try:
        with companions, Progress(sum(layout.nbytes for layout in layouts), progress, "saving") as bar:
            work = _Work(stored, specs, reader, companions, bar, go_on)
            publish(target, layouts, work.fill)
            companions.put_in_place()
    except BaseException:
        _remove_empty(made)
        raise
    finally:
        reader.close()
    return Resharded(
        folder=target,
        files=len(layouts),
        tensors=len(stored),
        nbytes=sum(spec.nbytes for spec in specs.values()),
        cast=sum(tensor.spec != specs[name] for name, tensor in stored.items()),
        overflowed=tuple(work.overflowed),
        copied=companions.copied,
        left_out=companions.left_out,
    )


class _Work:
    """How each tensor is written."""

    def __init__(
        self,
        stored: dict[str, StoredTensor],
        specs: dict[str, TensorSpec],
        reader: FileReader,
        companions: Companions,
        bar: Progress,
        go_on: GoOn,
    ) -> None:
        self._stored, self._specs, self._reader = stored, specs, reader
        self._companions, self._bar, self._go_on = companions, bar, go_on
        self._done = 0
        self.overflowed: dict[str, None] = {}

    def fill(self, writer: SafetensorsWriter, name: str) -> None:
        self._companions.stage()  # not sooner: only now has the target been found fit, and is nobody else's
        tensor = self._stored[name]
        if tensor.spec == self._specs[name]:
            writer.copy(name, self._ranges(tensor))
            self._reader.descriptor(tensor.file)  # a change meanwhile is noticed too
        else:
            writer.write(name, self._cast(tensor, self._specs[name].dtype))

    def _ranges(self, tensor: StoredTensor) -> Iterator[tuple[int, int, int]]:
        descriptor = self._reader.descriptor(tensor.file)
        for start in range(0, tensor.nbytes, _PIECE):
            nbytes = min(_PIECE, tensor.nbytes - start)
            yield descriptor, tensor.offset + start, nbytes
            self._wrote(nbytes)

    def _cast(self, tensor: StoredTensor, dtype: torch.dtype) -> Iterator[memoryview]:
        for part in chunks_of(tensor, self._reader):
            values = part.to(dtype)
            infinite = values.isinf()
            if infinite.any() and not part[infinite].isinf().all():
                self.overflowed[tensor.name] = None
            yield buffer_of(values)
            self._wrote(values.nbytes)

    def _wrote(self, nbytes: int) -> None:
        self._done += nbytes
        self._bar.show(self._done)
        self._go_on()


def _place(tensor: StoredTensor) -> tuple[str, int]:
    """Tensors are written in the order in which they lie, so that the disk reads on."""
    return tensor.file.path.name, tensor.offset


def _metadata(index: CheckpointIndex, reader: FileReader) -> dict[str, str]:
    """What the headers of all files say beside the tensors. Tensors change files, so it must hold for all of them."""
    said: dict[str, set[str]] = {}
    for file in index.files:
        for key, value in _metadata_of(file, reader).items() if file.path.suffix == ".safetensors" else ():
            said.setdefault(key, set()).add(value)
    if differing := [key for key, values in said.items() if len(values) > 1]:
        logger.warning("the shards differ in the metadata %s, which is left out", ", ".join(map(repr, differing)))
    return {key: value for key, (value, *more) in said.items() if not more}


def _metadata_of(file: SourceFile, reader: FileReader) -> dict[str, str]:
    length = bytearray(_LENGTH_FIELD)
    reader.read(file, 0, memoryview(length))
    header = bytearray(int.from_bytes(length, "little"))
    reader.read(file, _LENGTH_FIELD, memoryview(header))
    metadata = parse_json_object(bytes(header), file.path).get("__metadata__")
    return {key: str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _missing_folders(folder: Path) -> list[Path]:
    """`folder` and those above it that do not exist yet, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # never made, or somebody else's files are in it by now
            return
