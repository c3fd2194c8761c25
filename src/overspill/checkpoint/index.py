"""What a checkpoint holds and where: a path in, each tensor's name, spec, file and offset out. Reads headers only."""

import difflib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from overspill.checkpoint.pickled import read_pickled
from overspill.checkpoint.safetensors_header import MAX_HEADER, parse_json_object, read_header
from overspill.errors import (
    CheckpointChangedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointUnsafeError,
)
from overspill.tensors import TensorSpec

_FORMATS: dict[str, Callable[[BinaryIO, Path, int], dict[str, tuple[TensorSpec, int]]]] = {
    ".safetensors": read_header,
    ".bin": read_pickled,
    ".pt": read_pickled,
    ".pth": read_pickled,
}
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was opened: offsets into it hold for as long as it stays so."""

    path: Path
    size: int
    mtime_ns: int
    device: int
    inode: int

    def __hash__(self) -> int:
        return hash((self.inode, self.size, self.mtime_ns))  # asked for at each read, and paths are slow to hash

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> "SourceFile":
        """The file that is at `path` now."""
        path = Path(path).absolute()
        return cls._of(path, path.stat())

    @classmethod
    def _of(cls, path: Path, status: os.stat_result) -> "SourceFile":
        return cls(path, status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)

    def check(self, descriptor: int) -> None:
        """Raise CheckpointChangedError unless the open `descriptor` is still this file, unmodified."""
        now = os.fstat(descriptor)
        # Not the device: a network file system that is mounted again may number the same file's device anew.
        if now.st_ino != self.inode:
            change = "it is another file now"
        elif now.st_size != self.size:
            change = f"it had {self.size} bytes and has {now.st_size}"
        elif now.st_mtime_ns != self.mtime_ns:
            change = "it was written to"
        else:
            return
        raise CheckpointChangedError(f"{self.path} changed after it was opened: {change}. Load the model again")


@dataclass(frozen=True)
class FileSpan:
    """Some bytes of a file. A tensor is one span, or several that are gathered in order."""

    file: SourceFile
    offset: int
    nbytes: int

    def part(self, start: int, stop: int) -> "FileSpan":
        """The bytes of it from `start` to `stop`."""
        return FileSpan(self.file, self.offset + start, stop - start)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: `nbytes` bytes of `file` from `offset` on are its values, in row-major order."""

    name: str
    spec: TensorSpec
    file: SourceFile
    offset: int

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def spans(self) -> tuple[FileSpan, ...]:
        return (FileSpan(self.file, self.offset, self.nbytes),) if self.nbytes else ()

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return (self.file,)


class CheckpointIndex(Mapping[str, StoredTensor]):
    """Every tensor of a checkpoint by name, and the files that hold them. Immutable."""

    def __init__(self, path: Path, tensors: Iterable[StoredTensor]) -> None:
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self.files: tuple[SourceFile, ...] = tuple(dict.fromkeys(tensor.file for tensor in self._tensors.values()))

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.files[0].path.parent if self.files else self.path

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"CheckpointIndex({str(self.path)!r}, {len(self)} tensors in {len(self.files)} files)"


_LEFT_BY_A_SAVE = re.compile(r"\.overspill-[0-9a-f]{8}\.")
"""In the names of files that a save writes aside: they are a checkpoint only if an index lists them."""


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Index the checkpoint at `path`: a safetensors file, a file of torch.save, an index.json, or a folder of these.

    A folder is read as Transformers reads it: safetensors before pickles, an index before what it lists, `model`
    before other names. Safetensors without an index are read together. Raises CheckpointError's subclasses.
    """
    root = Path(path).absolute()  # so that a later chdir does not move it; resolving would lose the name that was given
    files = choose_files(root)
    if files[0].suffix == ".json":
        return CheckpointIndex(root, _read_sharded(files[0]))
    return CheckpointIndex(root, _read_together(files))


def choose_files(root: Path) -> list[Path]:
    """What is read of a path: one index.json, or the files that hold the tensors."""
    kind = _kind(root)
    if kind is None:
        raise CheckpointNotFoundError(f"there is no checkpoint at {root}. {_suggest(root)}")
    if kind == stat.S_IFDIR:
        return _choose_in_folder(root)
    if root.suffix != ".json" and root.suffix not in _FORMATS:
        raise CheckpointNotFoundError(
            f"{root} is not a checkpoint by its name. Give a file that ends in {', '.join(_FORMATS)} or .index.json, "
            "or the folder of such files"
        )
    return [root]


def _suggest(missing: Path) -> str:
    if _kind(missing.parent) != stat.S_IFDIR:
        return f"Its folder {missing.parent} does not exist either"
    with _reading(missing.parent):
        names = [entry.name for entry in missing.parent.iterdir()]
    near = difflib.get_close_matches(missing.name, names, cutoff=0.5)
    if not near:
        return f"Nothing in {missing.parent} has a name like it"
    return f"In {missing.parent} there is {_listed(near)}"


def _choose_in_folder(folder: Path) -> list[Path]:
    with _reading(folder):
        files = sorted(entry.name for entry in folder.iterdir() if _kind(entry) == stat.S_IFREG)
    names = [name for name in files if not _LEFT_BY_A_SAVE.search(name)]

    def ending(*suffixes: str) -> list[str]:
        return [name for name in names if name.endswith(suffixes)]

    # In order of preference. Only safetensors files may be several: pickles beside each other are more often a
    # trainer's state (optimizer.pt, training_args.bin) than a model in pieces.
    if "model.safetensors.index.json" in names:
        chosen = ["model.safetensors.index.json"]
    elif "model.safetensors" in names:
        chosen = ["model.safetensors"]
    elif indexes := ending(".safetensors.index.json"):
        chosen = [_only(indexes, folder)]
    elif safetensors := ending(".safetensors"):
        chosen = safetensors
    elif "pytorch_model.bin.index.json" in names:
        chosen = ["pytorch_model.bin.index.json"]
    elif "pytorch_model.bin" in names:
        chosen = ["pytorch_model.bin"]
    elif indexes := [name for name in names if name == "index.json" or name.endswith(".index.json")]:
        chosen = [_only(indexes, folder)]  # of whatever name, as Accelerate's callers write them
    elif pickles := ending(".bin", ".pt", ".pth"):
        chosen = [_only(pickles, folder)]
    else:
        raise CheckpointNotFoundError(
            f"{folder} holds no checkpoint: no *.safetensors, *.safetensors.index.json, pytorch_model.bin.index.json, "
            f"or a .bin, .pt or .pth file. It holds {_listed(names) if names else 'no files'}. "
            "Give the folder that the weights were saved or downloaded to"
        )
    return [folder / name for name in chosen]


def _only(names: list[str], folder: Path) -> str:
    if len(names) > 1:
        raise CheckpointNotFoundError(f"{folder} holds {_listed(names)}, and any may be meant. Give the path of one")
    return names[0]


def _read_together(files: list[Path]) -> list[StoredTensor]:
    """The tensors of all `files`, no name of which may occur twice."""
    found: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in _read_file(path).items():
            if name in found:
                raise CheckpointCorruptError(
                    f"{found[name].file.path} and {path} both hold tensor {name!r}, and no index.json says which "
                    "counts. Give the path of one file, or remove the other from the folder"
                )
            found[name] = tensor
    return list(found.values())


def _read_sharded(index: Path) -> list[StoredTensor]:
    """The tensors that `index` maps, each from the shard it is mapped to. What else a shard holds is not in the map,
    and so not in the checkpoint."""
    weight_map = read_weight_map(index)
    shards = list(dict.fromkeys(weight_map.values()))
    _check_shards(shards, index)
    content = {shard: _read_file(index.parent / shard) for shard in shards}
    absent = [f"{name!r} ({shard})" for name, shard in weight_map.items() if name not in content[shard]]
    if absent:
        raise CheckpointCorruptError(
            f"{index} lists tensors that are not in their shards: {_listed(absent, quote=False)}. "
            "Download or save the index and its shards again, together"
        )
    return [content[shard][name] for name, shard in weight_map.items()]


def read_weight_map(index: Path) -> dict[str, str]:
    """Each tensor's shard as `index` names it, wherever that may lie. Raises CheckpointError's subclasses."""
    with _opened(index) as (file, source):
        if source.size > MAX_HEADER:
            raise CheckpointCorruptError(f"{index} has {source.size} bytes, too many for an index. Give another file")
        document = parse_json_object(file.read(source.size), index)  # no more, should it grow meanwhile
    weight_map = document.get("weight_map")
    if "weight_map" not in document and any(isinstance(shard, str) for shard in document.values()):
        weight_map = document  # all of it is the map: so Accelerate's guide writes an index by hand
    if not isinstance(weight_map, dict):
        raise CheckpointCorruptError(
            f'{index} has no "weight_map" that maps tensors to files, so it is not the index of a checkpoint. '
            "Give the *.index.json file, or its folder"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointCorruptError(f"{index} maps tensor {name!r} to {shard!r}, not to a file. Save it again")
    return weight_map


def _check_shards(shards: list[str], index: Path) -> None:
    for shard in shards:
        if leaves_folder(shard):
            raise CheckpointUnsafeError(
                f"{index} names the shard {shard!r}, which lies outside {index.parent}: a checkpoint must not read "
                "other files of this machine. Put the shard beside the index, and its bare name into the index"
            )
    missing = [shard for shard in shards if _kind(index.parent / shard) != stat.S_IFREG]
    if missing:
        raise CheckpointNotFoundError(
            f"{index} names {len(missing)} of {len(shards)} shards that are not in {index.parent}: "
            f"{', '.join(map(repr, missing))}. Download or copy them there"
        )


def leaves_folder(shard: str) -> bool:
    """Whether a shard of this name would lie outside its index's folder."""
    # By its name alone. Where a plain name is a symbolic link, its owner has put it there, as the Hugging Face cache
    # does (snapshots/…/model.safetensors -> ../../blobs/…), so it is followed. Windows' names are refused everywhere:
    # a checkpoint is as safe on one system as on another.
    return any(path.anchor or ".." in path.parts for path in (PurePosixPath(shard), PureWindowsPath(shard)))


def _read_file(path: Path) -> dict[str, StoredTensor]:
    read_format = _FORMATS.get(path.suffix)
    if read_format is None:
        raise CheckpointNotFoundError(f"{path} is named as a shard, but does not end in {', '.join(_FORMATS)}")
    with _opened(path) as (file, source):
        tensors = read_format(file, path, source.size)
    return {name: StoredTensor(name, spec, source, offset) for name, (spec, offset) in tensors.items()}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, SourceFile]]:
    """The open file, and its identity as taken from the descriptor that is read, not from a path that can move."""
    # Non-blocking, or a named pipe that poses as a checkpoint would hang us; regular files do not care.
    with _reading(path), os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointNotFoundError(f"{path} is not a regular file. Give the path of one")
        _refuse_lfs_pointer(file, path)
        yield file, SourceFile._of(path, status)


def _kind(path: Path) -> int | None:
    """S_IFREG, S_IFDIR or another kind of file, symbolic links followed; None where there is nothing."""
    with _reading(path):
        try:
            return stat.S_IFMT(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # a null byte, or half of a surrogate pair: no file can have such a name
            return None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointReadError(
            f"{path} cannot be read: {error.strerror or error}. Check its permissions and the disk"
        ) from error


def _refuse_lfs_pointer(file: BinaryIO, path: Path) -> None:
    # A clone without Git LFS leaves a text of three lines in each weight's place: the likeliest "corrupt" file of all.
    if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
        raise CheckpointNotFoundError(f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder")
    file.seek(0)


def _listed(names: Iterable[str], *, quote: bool = True) -> str:
    """The first few of `names`, and how many more there are."""
    shown = [repr(name) if quote else name for name in names]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + more
