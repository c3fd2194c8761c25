"""Folders that others made, share or lie in wait in: nothing of theirs is written, deleted or trusted."""

import errno
import fcntl
import json
import os
import secrets
import signal
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from overspill.bundles import Bundle, BundleTensor, OffloadRoot
from overspill.checkpoint import open_checkpoint
from overspill.checkpoint.publishing import INDEX, publish
from overspill.checkpoint.writer import SafetensorsWriter, lay_out
from overspill.devices import buffer_of
from overspill.errors import OffloadFolderError, SaveError
from overspill.offload_folder import OffloadFolder
from overspill.tensors import TensorSpec

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def module_of(value: float) -> list[BundleTensor]:
    data = torch.full((8,), value)
    return [BundleTensor("w", TensorSpec.of(data), None, lambda: data.view(torch.uint8))]


def assert_holds(bundle: Bundle, value: float) -> None:
    assert torch.equal(load_file(bundle.file.path)["w"], torch.full((8,), value))


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


MARK = json.dumps({"made by": "overspill", "format": 1, "fingerprint": "me", "made the folder": True})
PLANTED = json.dumps(
    {
        "made by": "overspill",
        "format": 1,
        "fingerprint": "me",
        "module": "a",
        "tensors": [
            {"name": "w", "dtype": "float32", "shape": [8], "offset": -1, "file": "/etc/passwd", "nbytes": 2**62}
        ],
    }
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An offload folder, as somebody left it who knows the model's fingerprint."""
    folder = tmp_path / "offload"
    (folder / "a").mkdir(parents=True)
    (folder / "overspill.json").write_text(MARK)
    (folder / "a" / "index.json").write_text(PLANTED)
    return folder


# ---------------------------------------------------------------- planted by this user, or by accident


def test_what_a_planted_index_says_of_tensors_is_never_read(folder: Path) -> None:
    root = OffloadRoot(folder, fingerprint="me")
    [bundle] = root.write({"a": module_of(1.0)})
    assert_holds(bundle, 1.0)
    assert "passwd" not in (folder / "a" / "index.json").read_text()
    assert bundle.file.path.parent == folder / "a"


@pytest.mark.parametrize("name", ["tensors.safetensors", "tensors.safetensors.partial", "index.json.old"])
def test_a_hard_link_to_somebodys_file_is_let_go_of_and_not_written_through(
    name: str, folder: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.link(victim, folder / "a" / name)
    root = OffloadRoot(folder, fingerprint="me")
    written = root.write({"a": module_of(1.0)})
    root.remove(written)
    root.close()
    assert victim.read_text() == "mine"
    assert victim.stat().st_nlink == 1


def test_a_mark_that_is_a_hard_link_is_read_and_never_written(folder: Path, tmp_path: Path) -> None:
    os.link(folder / "overspill.json", tmp_path / "victim")
    root = OffloadRoot(folder, fingerprint="me")
    root.remove(root.write({"a": module_of(1.0)}))
    root.close()
    assert (tmp_path / "victim").read_text() == MARK


def test_a_mark_that_all_may_write_opens_no_door(folder: Path, tmp_path: Path) -> None:
    (folder / "overspill.json").chmod(0o666)
    (folder / "theirs").mkdir()
    (folder / "theirs" / "notes.txt").write_text("mine")
    root = OffloadRoot(folder, fingerprint="me")
    root.remove(root.write({"a": module_of(1.0)}))
    with pytest.raises(OffloadFolderError, match="in the way"):
        root.write({"theirs": module_of(1.0)})
    root.close()
    assert (folder / "theirs" / "notes.txt").read_text() == "mine"


# ---------------------------------------------------------------- another user's


@as_root
@pytest.mark.parametrize("what", ["overspill.json", "a", "a/index.json"])
def test_what_another_user_made_is_refused_and_stays(what: str, folder: Path) -> None:
    os.chown(folder / what, NOBODY, NOBODY)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(OffloadFolderError, match=r"made by another user|not made by overspill"):
        OffloadRoot(folder, fingerprint="me").write({"a": module_of(1.0)})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@as_root
def test_an_empty_folder_that_another_user_laid_out_is_not_written_to(tmp_path: Path) -> None:
    root = OffloadRoot(tmp_path / "offload", fingerprint="me")
    trap = root.path / "a"
    trap.mkdir()
    trap.chmod(0o777)
    os.chown(trap, NOBODY, NOBODY)
    with pytest.raises(OffloadFolderError, match="offload/a is in the way: it was made by another user"):
        root.write({"a": module_of(1.0)})
    assert list(trap.iterdir()) == []


def as_nobody(act: Callable[[], None]) -> bool:
    """Whether `act` ends well for a user without rights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: a child of threads; it only touches files
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: all may write, each owns what is theirs. pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@as_root
def test_another_user_can_read_and_change_nothing_of_ours(shared: Path) -> None:
    with umask(0):
        root = OffloadRoot(shared / "offload", fingerprint="me")
        [bundle] = root.write({"a": module_of(1.0)})
        converted = OffloadFolder(shared, fingerprint="me", nbytes=1)
        converted.open().close()
    files = [bundle.file.path, bundle.index.path, root.path / "overspill.json", converted.tensors]
    assert as_nobody(lambda: list(shared.iterdir()) and None)  # it is no wall that keeps them out
    for path in files:
        assert not as_nobody(lambda path=path: path.read_bytes() and None)  # type: ignore[misc]
        assert not as_nobody(lambda path=path: path.unlink())  # type: ignore[misc]
    for parent in {path.parent for path in files}:
        assert not as_nobody(lambda parent=parent: (parent / "planted").touch())  # type: ignore[misc]
        assert not as_nobody(lambda parent=parent: parent.rename(shared / "away"))  # type: ignore[misc]
    assert_holds(bundle, 1.0)
    root.close()
    converted.remove()


@as_root
def test_another_users_offload_folder_is_refused_to_one_without_rights(shared: Path) -> None:
    root = OffloadRoot(shared / "offload", fingerprint="me")
    [bundle] = root.write({"a": module_of(1.0)})
    root.close()
    root.path.chmod(0o777)  # as open as a careless owner may leave it

    def act() -> None:
        with pytest.raises(OffloadFolderError):
            OffloadRoot(root.path, fingerprint="me").write({"a": module_of(2.0)})

    assert as_nobody(act)
    assert_holds(bundle, 1.0)


# ---------------------------------------------------------------- temporary folders


@pytest.mark.parametrize("kind", ["link", "folder", "file"])
def test_a_temporary_folder_whose_name_was_guessed_is_made_elsewhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, temporary = tmp_path / "theirs", tmp_path / "tmp"
    theirs.mkdir()
    temporary.mkdir()
    for prefix in ("overspill-", "overspill-me-"):
        trap = temporary / f"{prefix}guessed"
        {"link": lambda trap: trap.symlink_to(theirs), "folder": Path.mkdir, "file": Path.touch}[kind](trap)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(tempfile, "_get_candidate_names", lambda: iter(["guessed", "free"]))
    root = OffloadRoot(None, fingerprint="me")
    root.write({"a": module_of(1.0)})
    converted = OffloadFolder(None, fingerprint="me", nbytes=1)
    assert (root.path.name, converted.path.name) == ("overspill-free", "overspill-me-free")
    root.close()
    converted.remove()
    assert {path.name for path in temporary.iterdir()} == {"overspill-guessed", "overspill-me-guessed"}
    assert list(theirs.iterdir()) == []


@pytest.mark.parametrize("swap", ["link", "folder", "gone", "file"])
def test_a_folder_of_converted_tensors_that_was_swapped_is_not_cleared(swap: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "tensors.bin").write_text("mine")
    (theirs / "overspill.json").write_text("mine")
    converted = OffloadFolder(tmp_path, fingerprint="me", nbytes=1)
    converted.open().close()
    converted.path.rename(tmp_path / "away")
    if swap == "link":
        converted.path.symlink_to(theirs)
    elif swap == "folder":
        theirs.rename(converted.path)
        theirs = converted.path
    elif swap == "file":
        converted.path.write_text("mine")
    converted.remove()
    assert {path.name: path.read_text() for path in theirs.iterdir()} == dict.fromkeys(
        ["tensors.bin", "overspill.json"], "mine"
    )


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_what_is_written_for_ourselves_is_private_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        root = OffloadRoot(tmp_path / "offload", fingerprint="me")
        root.write({"a": module_of(1.0)})
        converted = OffloadFolder(tmp_path, fingerprint="me", nbytes=1)
        converted.open().close()
    for path in (root.path, *root.path.rglob("*"), converted.path, *converted.path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# ---------------------------------------------------------------- what a killed process has left


def left_in(folder: Path) -> Path:
    """The folder of converted tensors of a process that was killed."""
    before = set(folder.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as above
        child = os.fork()
    if child == 0:
        converted = OffloadFolder(folder, fingerprint="them", nbytes=1)
        with converted.open() as file:
            file.write(b"tensors")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = set(folder.iterdir()) - before
    return left


def test_the_next_load_removes_what_killed_ones_have_left(tmp_path: Path) -> None:
    left = left_in(tmp_path)
    assert sorted(path.name for path in left.iterdir()) == ["overspill.json", "tensors.bin"]
    converted = OffloadFolder(tmp_path, fingerprint="me", nbytes=1)
    assert list(tmp_path.iterdir()) == [converted.path]
    converted.remove()


def test_what_lives_is_no_leftover_here_or_in_another_process(tmp_path: Path) -> None:
    first = OffloadFolder(tmp_path, fingerprint="me", nbytes=1)
    first.open().close()
    left = left_in(tmp_path)  # made beside the first, which stays
    second = OffloadFolder(tmp_path, fingerprint="me", nbytes=1)
    assert set(tmp_path.iterdir()) == {first.path, second.path}
    assert first.tensors.exists()
    assert not left.exists()
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def changed(left: Path, kind: str) -> None:
    """Make a leftover something that only looks like one."""
    mark = left / "overspill.json"
    document = json.loads(mark.read_text())
    if kind == "no mark":
        mark.unlink()
    elif kind == "an empty mark":
        mark.write_text("")
    elif kind == "a mark of another kind":
        mark.write_text(json.dumps({"made by": "overspill", "format": 1, "fingerprint": document["fingerprint"]}))
    elif kind == "no table":
        mark.write_text("[]")
    elif kind == "another machine's":
        mark.write_text(json.dumps({**document, "machine": "another"}))
    elif kind == "a link in the mark's place":
        mark.rename(left / "mine.json")
        mark.symlink_to(left / "mine.json")
    elif kind == "another name":
        left.rename(left.with_name("mine"))
    else:
        assert kind == "a pipe in the mark's place"
        mark.unlink()
        os.mkfifo(mark)


LOOKALIKES = [
    "no mark",
    "an empty mark",
    "a mark of another kind",
    "no table",
    "another machine's",
    "a link in the mark's place",
    "a pipe in the mark's place",
    "another name",
]


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_what_only_looks_like_a_leftover_stays(kind: str, tmp_path: Path) -> None:
    changed(left_in(tmp_path), kind)
    before = sorted(tmp_path.rglob("*"))
    OffloadFolder(tmp_path, fingerprint="me", nbytes=1).remove()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_to_a_leftover_elsewhere_is_not_followed(tmp_path: Path) -> None:
    for name in ("elsewhere", "here"):
        (tmp_path / name).mkdir()
    left = left_in(tmp_path / "elsewhere")
    (tmp_path / "here" / left.name).symlink_to(left)
    OffloadFolder(tmp_path / "here", fingerprint="me", nbytes=1).remove()
    assert (left / "tensors.bin").read_bytes() == b"tensors"


def test_what_somebody_has_put_into_a_leftover_stays(tmp_path: Path) -> None:
    left = left_in(tmp_path)
    (left / "notes.txt").write_text("mine")
    OffloadFolder(tmp_path, fingerprint="me", nbytes=1).remove()
    assert [path.name for path in left.iterdir()] == ["notes.txt"]


@as_root
def test_a_leftover_that_another_user_laid_out_stays(tmp_path: Path) -> None:
    left = left_in(tmp_path)
    os.chown(left / "overspill.json", NOBODY, NOBODY)
    OffloadFolder(tmp_path, fingerprint="me", nbytes=1).remove()
    assert (left / "tensors.bin").exists()


def test_without_locks_nothing_is_a_leftover_and_loads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_in(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    OffloadFolder(tmp_path, fingerprint="me", nbytes=1).remove()
    assert list(tmp_path.iterdir()) == [left]


# ---------------------------------------------------------------- saved checkpoints


def save(folder: Path, value: float = 1.0, files: int = 2, before: Callable[[], None] = lambda: None) -> None:
    tensors = {f"t{number}": torch.full((4,), value) for number in range(files)}

    def fill(writer: SafetensorsWriter, name: str) -> None:
        before()
        writer.write(name, [buffer_of(tensors[name])])

    publish(folder, [lay_out([(name, TensorSpec.of(tensor))]) for name, tensor in tensors.items()], fill)


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(("mask", "mode"), [(0o000, 0o666), (0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_checkpoint_is_readable_by_whom_the_umask_lets_from_its_first_byte(
    mask: int, mode: int, files: int, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    seen: set[int] = set()
    with umask(mask):
        for _ in range(2):  # the second replaces the first
            save(folder, files=files, before=lambda: seen.update(path.stat().st_mode for path in folder.iterdir()))
    assert {stat.S_IMODE(found) for found in seen} == {mode}
    assert modes(folder) == {path.name: mode for path in folder.iterdir()} | {"out": 0o777 & ~mask}


def test_saving_leaves_the_umask_of_other_threads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the whole process has but one"))
    save(tmp_path)


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_a_link_at_the_name_that_the_index_will_be_written_to_is_not_followed(
    link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    save(folder, 1.0)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 8)  # who lists the folder while it is written, knows it
    trap = folder / "model.overspill-00000000.json"

    def plant() -> None:
        if not os.path.lexists(trap):
            trap.symlink_to(victim) if link == "symbolic" else os.link(victim, trap)

    with pytest.raises(SaveError, match="File exists"):
        save(folder, 2.0, before=plant)
    assert victim.read_text() == "mine"
    assert torch.equal(load_file(open_checkpoint(folder)["t0"].file.path)["t0"], torch.full((4,), 1.0))


def test_a_file_that_takes_a_shards_name_in_the_last_instant_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "model-00002-of-00002.safetensors"
    link = os.link

    def late_link(source: Path, target: Path) -> None:
        theirs.write_text("mine")
        link(source, target)

    monkeypatch.setattr(os, "link", late_link)
    save(tmp_path)
    assert theirs.read_text() == "mine"
    assert set(open_checkpoint(tmp_path)) == {"t0", "t1"}


OUTSIDE: list[object] = [
    "../victim.safetensors",
    "/victim.safetensors",
    "..",
    "sub/victim.safetensors",
    "notes.txt",
    "a\0.safetensors",
]
OUTSIDE += ["\ud800.safetensors", "is-a-folder.safetensors", 3, None, ["x"], {}]
HOSTILE: dict[str, str | bytes] = {
    "names that lead away": json.dumps({"weight_map": {str(n): name for n, name in enumerate(OUTSIDE[:8])}}),
    "names that are none": json.dumps({"weight_map": {str(n): name for n, name in enumerate(OUTSIDE)}}),
    "lists without end": '{"weight_map": ' + "[" * 100_000,
    "no UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("place", [INDEX, "model.overspill-0a1b2c3d.json"])
@pytest.mark.parametrize("kind", [*HOSTILE, "a pipe"])
def test_a_save_into_a_hostile_folder_deletes_nothing_but_the_checkpoint_there(
    kind: str, place: str, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    (folder / "sub").mkdir(parents=True)
    (folder / "is-a-folder.safetensors").mkdir()
    kept = [tmp_path / "victim.safetensors", folder / "sub" / "victim.safetensors", folder / "notes.txt"]
    for path in kept:
        path.write_text("mine")
    save_file({"old": torch.ones(1)}, folder / "model.safetensors")
    if kind == "a pipe":
        os.mkfifo(folder / place)
    else:
        content = HOSTILE[kind]
        (folder / place).write_bytes(content if isinstance(content, bytes) else content.encode())
    save(folder)
    assert set(open_checkpoint(folder)) == {"t0", "t1"}
    assert [path.read_text() for path in kept] == ["mine"] * 3
    assert (folder / "is-a-folder.safetensors").is_dir()
