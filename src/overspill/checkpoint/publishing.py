"""A checkpoint's files written aside and put in place so that, at any instant, the old or the new one is there whole.

Note: the order of things. New shards have names that no checkpoint uses. Only when all of them are on the disk does one
rename make them the checkpoint: of the index, or of the one file that needs none. Then the old files go. Then the
shards get their usual names: a second name first, then an index that uses it, then the first name goes. Transformers
reads `model.safetensors` before an index and we read an index before that, so with both of them there either reader
finds a whole checkpoint, be it the old or the new one. Whoever is killed leaves at most files with our names, and files
that a list with such a name tells of: old shards that were about to go, second names that were about to count. The next
save removes what of these is not the checkpoint's.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from overspill.checkpoint.index import SourceFile, read_weight_map
from overspill.checkpoint.writer import PUBLIC, FileLayout, SafetensorsWriter, new_file, write_all
from overspill.config import MIB, format_size
from overspill.errors import CheckpointError, OverspillError, SaveError

WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_ASIDE: Final = re.compile(r"model(-\d{5,}-of-\d{5,})?\.overspill-[0-9a-f]{8}\.(safetensors|json)")
_SHARD: Final = ".safetensors"
_CHECKPOINTS: Final = (_SHARD, ".bin", ".pt", ".pth", "config.json", ".index.json")
_SLACK: Final = 4 * MIB  # for an index and the file system's own needs

Fill = Callable[[SafetensorsWriter, str], None]
Spots = dict[str, tuple[SourceFile, int]]
"""Where tensors lie: a file, and the first byte in it."""


def publish(
    folder: Path, shards: Sequence[FileLayout], fill: Fill, stands: Callable[[Spots], object] = lambda spots: None
) -> None:
    """Make `shards` the checkpoint in `folder`; `fill` writes one tensor.

    `stands` is told where each tensor lies once the new checkpoint stands, also if clearing up fails then: the old one
    may be gone.
    """
    _check_target(folder)
    with _explained(f"cannot make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        publication = _Publication(folder, shards)
        try:
            publication.write(fill)
            publication.put_in_place()
            publication.clear_up()
        except BaseException:
            publication.abandon()
            raise
        finally:
            # Behind abandon, which removes names that a tensor would else be said to lie under.
            if publication.stands():
                stands(publication.spots())


def _check_target(folder: Path) -> None:
    if folder.is_file():
        raise SaveError(f"{folder} is a file, and a checkpoint is a folder. Give another path, or move the file away")
    with _explained(f"cannot look into {folder}"):
        names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
    if names and not any(name.endswith(_CHECKPOINTS) or _ASIDE.fullmatch(name) for name in names):
        raise SaveError(
            f"{folder} holds {', '.join(sorted(names)[:3])} and no checkpoint. Give a new or empty folder, or one with "
            "a checkpoint to replace"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No two saves to one folder at once."""
    with _explained(f"cannot open the folder {folder}"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SaveError(f"another save to {folder} is under way. Wait for it, or give another folder") from None
        except OSError:  # a file system without locks: two saves at once are then the user's to avoid
            pass
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _explained(what: str, then: str = "The checkpoint that was there is whole") -> Iterator[None]:
    try:
        yield
    except OverspillError:
        raise
    except OSError as error:
        raise SaveError(f"{what} ({error.strerror or error}). {then}") from error


class _Publication:
    """One save to one folder."""

    def __init__(self, folder: Path, shards: Sequence[FileLayout]) -> None:
        self._folder, self._shards = folder, list(shards)
        tag, other_tag = (f"overspill-{secrets.token_hex(4)}" for _ in range(2))
        count = len(shards)
        stems = ["model"] if count == 1 else [f"model-{n:05}-of-{count:05}" for n in range(1, count + 1)]
        self._names = [f"{stem}.safetensors" for stem in stems]
        self._aside = [f"{stem}.{tag}.safetensors" for stem in stems]
        self._index_aside = folder / f"model.{tag}.json"
        self._old_index_aside = folder / f"model.{other_tag}.json"
        self._inodes: list[int] = []  # of the shards, whatever their names
        self._old = self._old_files()

    # Aside.

    def write(self, fill: Fill) -> None:
        """All shards, under names of their own, on the disk."""
        self._remove_leftovers()
        self._require(sum(layout.nbytes for layout in self._shards))
        for name, layout in zip(self._aside, self._shards, strict=True):
            path = self._folder / name
            with _explained(f"writing {path} failed"), SafetensorsWriter(path, layout, mode=PUBLIC) as writer:
                for tensor in layout.specs:
                    fill(writer, tensor)
            self._inodes.append(path.stat().st_ino)

    def abandon(self) -> None:
        """Remove what was written aside, unless it is the checkpoint by now: an interrupt can come at any line."""
        self._old = self._old_files()
        with suppress(OSError):
            self._remove_leftovers()

    def _require(self, nbytes: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if nbytes + _SLACK > free:
            raise SaveError(
                f"the checkpoint needs {format_size(nbytes + _SLACK)} in {self._folder}, where {format_size(free)} are "
                "free: the old one must stand until the new one does. Free some space, or give another folder"
            )

    def _remove_leftovers(self) -> None:
        """Of saves that were killed. What the present checkpoint consists of is no leftover."""
        aside = [entry.name for entry in self._folder.iterdir() if _ASIDE.fullmatch(entry.name)]
        lists = [name for name in aside if name.endswith(".json")]
        listed = [shard for name in lists for shard in _shards_of(self._folder / name)]
        for name in [*listed, *aside]:  # the lists last, or a kill in between would leave files that no list tells of
            if name not in self._old:
                with suppress(OSError):
                    (self._folder / name).unlink()

    # In place.

    def put_in_place(self) -> None:
        """The one step that counts."""
        with _explained(f"putting the checkpoint in place in {self._folder} failed"):
            self._sync()
            if INDEX in self._old:  # the list of what is to go outlives it
                _write_new(self._old_index_aside, (self._folder / INDEX).read_bytes())
            if len(self._shards) == 1:
                (self._folder / self._aside[0]).replace(self._folder / WHOLE)
            else:
                self._write_index(self._aside)
                self._index_aside.replace(self._folder / INDEX)

    def clear_up(self) -> None:
        """Let go of the old checkpoint, and of names that were for the meantime."""
        with _explained(f"clearing up in {self._folder} failed", "The new checkpoint stands; save again to clear up"):
            self._sync()
            self._remove_old()
            if len(self._shards) > 1:
                self._use_usual_names()
            self._sync()

    def _remove_old(self) -> None:
        new = {WHOLE} if len(self._shards) == 1 else {INDEX, *self._aside}
        # The index first: without it, the shards that it lists are nobody's.
        for name in sorted(self._old, key=lambda name: name != INDEX):
            if name not in new:
                (self._folder / name).unlink(missing_ok=True)
        self._old_index_aside.unlink(missing_ok=True)

    def _use_usual_names(self) -> None:
        if any((self._folder / name).exists() for name in self._names):
            return  # someone else's files: ours keep the names that they have
        self._write_index(self._names)  # before the names are there: it tells the next save of them
        linked: list[str] = []
        try:
            for aside, name in zip(self._aside, self._names, strict=True):
                os.link(self._folder / aside, self._folder / name)
                linked.append(name)
        except OSError:  # a file system without links, or someone else's file in this instant
            for name in linked:
                (self._folder / name).unlink(missing_ok=True)
            self._index_aside.unlink()
            return
        self._sync()
        self._index_aside.replace(self._folder / INDEX)
        self._sync()
        for aside in self._aside:
            (self._folder / aside).unlink()
        self._aside = self._names

    def _write_index(self, names: Sequence[str]) -> None:
        """The index that calls the shards by `names`, still aside."""
        weight_map = {tensor: name for name, layout in zip(names, self._shards, strict=True) for tensor in layout.specs}
        specs = [spec for layout in self._shards for spec in layout.specs.values()]
        metadata = {"total_size": sum(s.nbytes for s in specs), "total_parameters": sum(s.numel for s in specs)}
        document = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
        _write_new(self._index_aside, (document + "\n").encode())

    def _sync(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _old_files(self) -> set[str]:
        """The safetensors checkpoint that is in the folder: what a new one replaces."""
        old = {name for name in (WHOLE, INDEX) if (self._folder / name).is_file()}
        return old.union(_shards_of(self._folder / INDEX)) if INDEX in old else old

    def stands(self) -> bool:
        """Whether the new checkpoint is the one in the folder: an interrupt can come behind the step that counts."""
        if len(self._inodes) < len(self._shards):
            return False  # not all of it was written
        names = {WHOLE} if len(self._shards) == 1 else _shards_of(self._folder / INDEX)
        try:
            return {(self._folder / name).stat().st_ino for name in names} == set(self._inodes)
        except OSError:
            return False

    def spots(self) -> Spots:
        """Where each tensor lies now."""
        return {
            tensor: (source, layout.offsets[tensor])
            for path, layout in zip(self._paths(), self._shards, strict=True)
            for source in (SourceFile.at(path),)
            for tensor in layout.specs
        }

    def _paths(self) -> list[Path]:
        if len(self._shards) == 1:
            return [self._folder / WHOLE]
        # Whoever was interrupted while shards got their usual names has some under the one, some under the other.
        pairs = zip(self._aside, self._names, strict=True)
        return [self._folder / (aside if (self._folder / aside).exists() else name) for aside, name in pairs]


def _shards_of(index: Path) -> set[str]:
    """The files beside `index` that it lists; none if it cannot be read."""
    try:
        listed = set(read_weight_map(index).values())
    except CheckpointError:
        return set()
    return {
        name
        for name in listed
        if Path(name).name == name and name.endswith(_SHARD) and _is_file_or_link(index.with_name(name))
    }


def _is_file_or_link(path: Path) -> bool:
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except (OSError, ValueError):  # nothing is there, or no file can have such a name
        return False
    return kind in (stat.S_IFREG, stat.S_IFLNK)


def _write_new(path: Path, content: bytes) -> None:
    """A new file with `content`, on the disk. Whoever sees the shards can foresee its name, and plant a link there."""
    with new_file(path, PUBLIC) as file:
        write_all(file, memoryview(content))
        os.fsync(file.fileno())
