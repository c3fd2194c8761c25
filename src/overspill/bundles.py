"""The files of modules that are offloaded to disk: a folder a module, in a root that is marked as one model's.

Note: whose files. The root carries a mark with the model's fingerprint, and its owner holds a lock on the mark for as
long as it lives, so neither another model nor a second copy of this one can come in between. Each module's folder
carries an index with the same fingerprint. What has neither is somebody else's: it is never overwritten and never
deleted. A mark without a lock was left by a run that ended; the same model may take the folder over.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch

from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.safetensors_header import MAX_HEADER
from overspill.checkpoint.writer import SafetensorsWriter, by_alignment, lay_out, private_file, write_all
from overspill.config import align, format_size
from overspill.devices import CPU, PAGE, buffer_of
from overspill.errors import OffloadFolderError, OverspillError, StateError
from overspill.tensors import TensorSpec

_MADE_BY = {"made by": "overspill", "format": 1}
_MARK = "overspill.json"
_TENSORS = "tensors.safetensors"
_INDEX = "index.json"
_NEW = ".partial"  # written, and not yet in its place
_OLD = ".old"  # what a new file has replaced, until all new files are in their places
_ASIDE = tuple(name + suffix for name in (_TENSORS, _INDEX) for suffix in (_NEW, _OLD))

# Names that no module's path is escaped to: a "%" that escapes is followed by two hexadecimal digits.
_ROOT_MODULE = "%root"
_SHORTENED = "%~"
_LONGEST_NAME = 200  # file systems allow 255 bytes, and some that encrypt names a good deal less


@dataclass(frozen=True)
class BundleTensor:
    """One tensor to write. `read` gives its bytes, flat in host memory, and is called when it is the tensor's turn.

    A tensor that is dense but not in order (channels_last, a transpose) has `strides`, and its bytes come as they lie.
    """

    name: str
    spec: TensorSpec
    strides: tuple[int, ...] | None
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Bundle:
    """One module's tensors on disk: `offsets` are absolute in `file`, `nbytes` is what the tensors take."""

    module: str
    folder: Path
    file: SourceFile
    index: SourceFile
    offsets: Mapping[str, int]
    nbytes: int


class OffloadRoot:
    """The folder of one model's bundles: the user's, or a temporary one that goes when this object does.

    Bundles in a user's folder stay there until they are removed, also after this process. Safe from several threads; a
    forked child changes nothing.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, fingerprint: str) -> None:
        self._lock = threading.Lock()
        self._claim = _Claim(None if folder is None else Path(folder).absolute(), fingerprint)
        self._claim.take()
        self._finalizer = weakref.finalize(self, self._claim.give_up)

    @property
    def path(self) -> Path:
        """The folder. A temporary one goes with its last bundle, and the next bundle makes another."""
        return self._claim.path

    def write(self, modules: Mapping[str, Sequence[BundleTensor]]) -> list[Bundle]:
        """A bundle of each module, by its path; all of them or none. Replaces bundles that the modules already have.

        Holds one tensor at a time in memory. What `read` raises is raised as it is where it is an error of ours.
        """
        if self._claim.is_inherited():
            raise OffloadFolderError(
                f"{self.path} belongs to the process that this one was forked from. "
                "Offload before the fork, or make the model in this process"
            )
        with self._lock:
            if not self._finalizer.alive:
                raise StateError(f"the offload folder {self.path} was closed. Make a new OffloadRoot")
            self._claim.take()
            try:
                return self._write(modules)
            finally:
                self._claim.tidy()  # a first call that fails leaves nothing at all

    def _write(self, modules: Mapping[str, Sequence[BundleTensor]]) -> list[Bundle]:
        drafts = [_Draft(self._claim, module, tensors) for module, tensors in modules.items()]
        for draft in drafts:
            draft.check_folder()
        try:
            for draft in drafts:
                draft.clear_aside()  # what an earlier run that was killed has left takes space
            self._require_space(sum(draft.nbytes for draft in drafts))
            with ExitStack() as undo:
                for draft in drafts:
                    draft.write_aside()
                bundles = [draft.publish(undo) for draft in drafts]
                self._claim.standing |= {bundle.folder: bundle for bundle in bundles}
                self._claim.found = False
                undo.pop_all()
        finally:
            for draft in drafts:
                draft.clear_aside()
        return bundles

    def _require_space(self, nbytes: int) -> None:
        with _explained(f"asking for the free space in {self.path}"):
            free = shutil.disk_usage(self.path).free
        if nbytes > free:
            raise OffloadFolderError(
                f"the offloaded modules need {format_size(nbytes)} in {self.path}, where {format_size(free)} are free: "
                f"{format_size(nbytes - free)} are missing. "
                "Free some space, pass another folder, or offload fewer modules"
            )

    def remove(self, bundles: Iterable[Bundle]) -> None:
        """Delete what was written for `bundles`, and our folders that are then empty. What is gone already is fine."""
        if self._claim.is_inherited():
            return
        with self._lock:
            for bundle in bundles:
                _delete(bundle)
                if self._claim.standing.get(bundle.folder) == bundle:
                    del self._claim.standing[bundle.folder]
            self._claim.tidy()

    def close(self) -> None:
        """Let go of the folder; remove it if it is a temporary one. Nothing more can be written."""
        if self._claim.is_inherited():
            return
        with self._lock:
            self._finalizer()


# ---------------------------------------------------------------- the root, and whose it is


class _Claim:
    """One model's hold on a root folder. Apart from OffloadRoot, whose finalizer gives it up."""

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self._given = folder
        self._owner = os.getpid()
        self._mark: int | None = None  # the descriptor that holds the lock
        self._made = False
        self.found = False  # the mark was there, and so far nothing of ours was
        self.fingerprint = fingerprint
        self.standing: dict[Path, Bundle] = {}

    def take(self) -> None:
        """Make the folder if it is not there, mark it and lock it. Nothing to do where that was done already."""
        if self._is_marked():
            return
        self._unlock()  # someone has deleted our mark, maybe with the folder: a lock on it keeps nobody out
        self.path, made = _make_root(self._given)
        self.found = (self.path / _MARK).exists()
        try:
            self._mark, self._made = _lock_mark(self.path / _MARK, self.fingerprint, made)
        except BaseException:
            if made:
                _remove_if_empty(self.path)
            raise

    def tidy(self) -> None:
        """Give the folder up if it holds no bundle of ours any more: the mark goes, and the folder if we made it."""
        if self._mark is None or self.standing or self._holds_leftovers():
            return
        if self.found:
            self._unlock()
            return
        if self._is_marked():
            with suppress(OSError):  # a folder that has become read-only: it does no harm there
                (self.path / _MARK).unlink()
        if self._made:
            _remove_if_empty(self.path)
        self._unlock()

    def give_up(self) -> None:
        """Leave a user's folder as it is, unlocked; take a temporary one away."""
        if self.is_inherited():
            return
        while self.standing and self._given is None:
            with suppress(OffloadFolderError):  # nobody is left to be told
                _delete(self.standing.popitem()[1])
        self.tidy()
        self._unlock()

    def is_inherited(self) -> bool:
        """Whether this is a forked child: files and lock are its parent's."""
        return os.getpid() != self._owner

    def _is_marked(self) -> bool:
        return self._mark is not None and _is_at(self.path / _MARK, self._mark)

    def _unlock(self) -> None:
        if self._mark is not None:
            fcntl.flock(self._mark, fcntl.LOCK_UN)  # closing alone would leave the lock to children that are alive
            os.close(self._mark)
            self._mark = None

    def _holds_leftovers(self) -> bool:
        """Whether an earlier run's bundles lie there yet: without a mark, nobody would know what they are."""
        try:
            folders = [entry for entry in self.path.iterdir() if entry.is_dir()]
        except OSError as error:
            return not isinstance(error, FileNotFoundError)  # where we cannot look, there may be some
        return any(_read_index(folder).get("fingerprint") == self.fingerprint for folder in folders)


def _make_root(given: Path | None) -> tuple[Path, bool]:
    """The root folder, and whether it was made just now."""
    if given is None:
        with _explained("making a temporary folder"):
            return Path(tempfile.mkdtemp(prefix="overspill-")), True
    with _explained(f"making the folder {given}", "Pass another folder"):
        given.parent.mkdir(parents=True, exist_ok=True)
        try:
            given.mkdir(mode=0o700)
        except FileExistsError:
            if not given.is_dir():
                raise OffloadFolderError(f"{given} is not a folder. Pass another folder") from None
            return given, False
        return given, True


def _lock_mark(mark: Path, fingerprint: str, made: bool) -> tuple[int, bool]:
    """The locked descriptor of a mark that is new, or of our own old one; and whether we made the folder it is in."""
    with _explained(f"writing and locking {mark}"):
        while True:
            try:
                return _new_mark(mark, {**_MADE_BY, "fingerprint": fingerprint, "made the folder": made}), made
            except FileExistsError:
                pass
            locked = _old_mark(mark, fingerprint)
            if locked is not None:
                return locked


def _new_mark(mark: Path, document: Mapping[str, object]) -> int:
    with private_file(mark) as file:
        descriptor = os.dup(file.fileno())
        try:
            # Waits: whoever opened the mark in this instant finds it empty, and leaves.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            write_all(file, memoryview(json.dumps(document).encode()))
        except BaseException:
            mark.unlink(missing_ok=True)
            os.close(descriptor)
            raise
    return descriptor


def _old_mark(mark: Path, fingerprint: str) -> tuple[int, bool] | None:
    """The mark that is there, locked; None if its owner removed it in this instant."""
    try:
        if not stat.S_ISREG(os.lstat(mark).st_mode):
            raise OffloadFolderError(f"{mark} is not a regular file, so it was not made here. Pass another folder")
        descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not is_own(os.fstat(descriptor)):
            raise OffloadFolderError(f"{mark} was made by another user. Pass another folder")
        free = try_lock(descriptor)
        if not _is_at(mark, descriptor):
            os.close(descriptor)
            return None
        content = read_mark(descriptor)
        if content or free:  # an empty mark that is locked is about to be written
            document = _checked_mark(mark, content, fingerprint)
        if not free:
            raise OffloadFolderError(
                f"{mark.parent} is in use by a copy of the same model, here or in another process. Pass another folder"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, document.get("made the folder") is True


def read_mark(descriptor: int) -> bytes:
    """What a mark says, in however many calls the system gives it."""
    content = b""
    while more := os.pread(descriptor, PAGE - len(content), len(content)):
        content += more
    return content


def is_own(status: os.stat_result) -> bool:
    """Whether it was made by this user: what others plant may say anything, and may change while it is used."""
    return status.st_uid == os.geteuid()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False


def try_lock(descriptor: int) -> bool:
    """Take the lock of a mark, unless its maker holds it yet. The system lets go of it for those who are killed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _checked_mark(mark: Path, content: bytes, fingerprint: str) -> dict[str, object]:
    document = _parsed(content)
    if not document.items() >= _MADE_BY.items() or not isinstance(document.get("fingerprint"), str):
        raise OffloadFolderError(
            f"{mark} cannot be read as the mark of an offload folder. Pass another folder, or delete the file if it is "
            "what a run that was killed has left"
        )
    if document["fingerprint"] != fingerprint:
        raise OffloadFolderError(f"{mark.parent} belongs to another model. Pass another folder")
    return document


# ---------------------------------------------------------------- a module's folder


class _Draft:
    """One module's files in the making: written aside, and renamed into place once those of all modules are written."""

    def __init__(self, claim: _Claim, module: str, tensors: Sequence[BundleTensor]) -> None:
        self._module = module
        self._folder = claim.path / _folder_name(module)
        self._owner = {**_MADE_BY, "fingerprint": claim.fingerprint, "module": module}
        self._made = False
        self._tensors = {tensor.name: tensor for tensor in tensors}
        assert len(self._tensors) == len(tensors), f"{module} has two tensors of one name"
        stored = by_alignment((tensor.name, _as_it_lies(tensor)) for tensor in tensors)
        self._layout = lay_out(stored, {"format": "pt"})
        self._index = self._describe()
        self.nbytes = align(self._layout.nbytes, PAGE) + align(len(self._index), PAGE)

    def check_folder(self) -> None:
        """Raise unless the folder is not there, empty, or this very module's."""
        with _explained(f"looking into {self._folder}"):
            try:
                status = os.lstat(self._folder)
                if not stat.S_ISDIR(status.st_mode):
                    problem = "is not a folder"
                elif not is_own(status):
                    problem = "was made by another user"
                elif not (self._is_hardly_begun() or self._owner.items() <= _read_index(self._folder).items()):
                    problem = f"was not made by overspill for module {self._module!r} of this model"
                else:
                    return
            except FileNotFoundError:
                return
        raise OffloadFolderError(f"{self._folder} is in the way: it {problem}. Pass another folder, or move it away")

    def _is_hardly_begun(self) -> bool:
        """Whether it is empty, or whoever began to write this module there was killed in the middle of its index."""
        entries = list(self._folder.iterdir())
        begun = self._folder / (_INDEX + _NEW)
        if entries != [begun]:
            return not entries
        content = _content_of_own(begun)
        beginning = json.dumps(self._owner).encode()[:-1]  # more follows
        return content is not None and content[: len(beginning)] == beginning[: len(content)]

    def write_aside(self) -> None:
        """Write both files under passing names. The index first: it tells whose folder this is if we are killed."""
        with _explained(f"writing {self._folder / _INDEX}"):
            self._make_folder()
            with private_file(self._folder / (_INDEX + _NEW)) as file:
                write_all(file, memoryview(self._index))
        tensors = self._folder / _TENSORS
        with (
            _explained(f"writing {tensors}"),
            SafetensorsWriter(self._folder / (_TENSORS + _NEW), self._layout) as writer,
        ):
            for name in self._layout.specs:
                with _explained(f"writing {name} to {tensors}"):
                    _copy(self._tensors[name], writer)

    def publish(self, undo: ExitStack) -> Bundle:
        """Give both files their names. `undo` gets what brings the old ones back."""
        for name in (_TENSORS, _INDEX):
            path = self._folder / name
            with _explained(f"writing {path}"):
                existed = os.path.lexists(path)
                undo.callback(_bring_back, path, existed=existed)
                if existed:
                    _keep_old(path)
                (self._folder / (name + _NEW)).replace(path)
        return Bundle(
            self._module,
            self._folder,
            SourceFile.at(self._folder / _TENSORS),
            SourceFile.at(self._folder / _INDEX),
            self._layout.offsets,
            sum(spec.nbytes for spec in self._layout.specs.values()),
        )

    def clear_aside(self) -> None:
        """Delete what lies under passing names, and the folder if we made it for nothing."""
        for name in _ASIDE:
            with suppress(OSError):  # most are not there; what cannot be deleted is deleted next time
                (self._folder / name).unlink()
        if self._made:
            _remove_if_empty(self._folder)

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(mode=0o700)
            self._made = True
        except FileExistsError:  # seen, and found to be ours, by `check_folder`
            pass

    def _describe(self) -> bytes:
        tensors: list[dict[str, object]] = []
        for name, offset in self._layout.offsets.items():
            tensor = self._tensors[name]
            entry = {"name": name, "dtype": str(tensor.spec.dtype).removeprefix("torch."), "shape": tensor.spec.shape}
            if tensor.strides is not None:
                entry["strides"] = tensor.strides
            tensors.append({**entry, "offset": offset, "nbytes": tensor.spec.nbytes})
        return json.dumps({**self._owner, "tensors": tensors}).encode()


def _folder_name(module: str) -> str:
    """A name that every file system takes, and that no other module has."""
    if not module:
        return _ROOT_MODULE
    name = quote(module, safe="", errors="surrogatepass")
    if name.startswith(".") or name == _MARK:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST_NAME:
        suffix = _SHORTENED + hashlib.sha256(name.encode()).hexdigest()[:32]
        name = name[: _LONGEST_NAME - len(suffix)] + suffix
    return name


def _as_it_lies(tensor: BundleTensor) -> TensorSpec:
    """The spec under which any reader of the file gets true values: dimensions in the order in which the bytes lie."""
    if tensor.strides is None:
        return tensor.spec
    dimensions = sorted(zip(tensor.strides, tensor.spec.shape, strict=True), key=lambda dimension: -dimension[0])
    return TensorSpec(tuple(size for _, size in dimensions), tensor.spec.dtype)


def _copy(tensor: BundleTensor, writer: SafetensorsWriter) -> None:
    # A function of its own, so that one tensor's memory is free before the next one is read.
    data = tensor.read()
    assert (data.dtype, data.device, data.is_contiguous()) == (torch.uint8, CPU, True), f"{tensor.name} is no bytes"
    writer.write(tensor.name, [buffer_of(data)])


def _keep_old(path: Path) -> None:
    """Give what is at `path`, and about to be replaced, a second name."""
    old = path.with_name(path.name + _OLD)
    try:
        os.link(path, old, follow_symlinks=False)
    except OSError:  # a file system without hard links: out of the way for an instant, then
        path.rename(old)


def _bring_back(path: Path, *, existed: bool) -> None:
    with suppress(OSError):  # the error that led here is the one to raise
        if existed:
            path.with_name(path.name + _OLD).replace(path)
        else:
            path.unlink()


def _delete(bundle: Bundle) -> None:
    """Delete the files that were written for `bundle`, unless others have taken their places, and its empty folder."""
    for source in (bundle.file, bundle.index):
        with (
            _explained(f"deleting {source.path}", "Delete it yourself"),
            suppress(FileNotFoundError, NotADirectoryError),
        ):
            now = os.lstat(source.path)
            # Not by the inode alone: its number is given to another file as soon as ours is gone.
            if (now.st_ino, now.st_size, now.st_mtime_ns) == (source.inode, source.size, source.mtime_ns):
                source.path.unlink()
    _remove_if_empty(bundle.folder)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # someone else put something there, or took the folder away: not ours to touch
        folder.rmdir()


def _read_index(folder: Path) -> dict[str, object]:
    """The index in a module's folder, or the one that a run that was killed was writing; empty if it is not ours."""
    for name in (_INDEX, _INDEX + _NEW):
        if os.path.lexists(folder / name):
            document = _parsed(_content_of_own(folder / name) or b"")
            return document if document.items() >= _MADE_BY.items() else {}
    return {}


def _content_of_own(path: Path) -> bytes | None:
    """What a file of this user's has in it; None if it is another's, or no file. Links are not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        return file.read(MAX_HEADER) if stat.S_ISREG(status.st_mode) and is_own(status) else None


def _parsed(content: bytes) -> dict[str, object]:
    """The JSON object that `content` is; empty if it is none."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


@contextmanager
def _explained(what: str, cure: str = "Free some space, or pass another folder") -> Iterator[None]:
    """Within, whatever fails, also what gives a tensor's values, becomes an error that says what was being done."""
    try:
        yield
    except OverspillError:
        raise
    except OSError as error:
        raise OffloadFolderError(f"{what} failed ({error.strerror or error}). {cure}") from error
    except Exception as error:
        raise OffloadFolderError(
            f"{what} failed ({type(error).__name__}: {error}). Nothing was offloaded; mend the cause and try again"
        ) from error
