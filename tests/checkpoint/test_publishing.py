"""What becomes of a folder when a checkpoint is put into it: its files, its leftovers, and what is not ours."""

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overspill.checkpoint import open_checkpoint
from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.publishing import INDEX, WHOLE, publish
from overspill.checkpoint.writer import FileLayout, SafetensorsWriter, lay_out
from overspill.devices import buffer_of
from overspill.errors import CheckpointError, SaveError
from overspill.tensors import TensorSpec

Tensors = dict[str, torch.Tensor]


def tensors(value: float = 1.0, names: str = "abc") -> Tensors:
    return {name: torch.full((2, 3), value + position) for position, name in enumerate(names)}


def layouts(values: Tensors, files: int) -> list[FileLayout]:
    names = list(values)
    return [lay_out([(n, TensorSpec.of(values[n])) for n in names[start::files]]) for start in range(files)]


def filling(values: Tensors) -> Callable[[SafetensorsWriter, str], None]:
    return lambda writer, name: writer.write(name, [buffer_of(values[name])])


def nothing_to_fill_with(writer: SafetensorsWriter, name: str) -> None:
    raise KeyError(name)


def put(folder: Path, values: Tensors, files: int = 1) -> dict[str, Any]:
    spots: dict[str, tuple[SourceFile, int]] = {}
    publish(folder, layouts(values, files), filling(values), spots.update)
    return spots


def files_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def assert_holds(folder: Path, values: Tensors) -> None:
    stored = open_checkpoint(folder)
    assert set(stored) == set(values)
    for name, tensor in values.items():
        assert torch.equal(load_file(stored[name].file.path)[name], tensor)


SHARDS = {INDEX, *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))}


# ---------------------------------------------------------------- what is there afterwards


@pytest.mark.parametrize("before", [None, 1, 2, 3])
@pytest.mark.parametrize("files", [1, 2, 3])
def test_the_new_files_have_the_usual_names_and_the_old_ones_are_gone(
    files: int, before: int | None, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "down"
    if before is not None:
        put(folder, tensors(9.0), before)
    put(folder, tensors(), files)
    shards = {f"model-{n:05}-of-{files:05}.safetensors" for n in range(1, files + 1)}
    assert files_in(folder) == ({WHOLE} if files == 1 else {INDEX, *shards})
    assert_holds(folder, tensors())


@pytest.mark.parametrize("files", [1, 3])
def test_it_says_where_each_tensor_lies_now(files: int, tmp_path: Path) -> None:
    values = tensors()
    spots = put(tmp_path, values, files)
    stored = open_checkpoint(tmp_path)
    assert {name: (stored[name].file, stored[name].offset) for name in values} == spots


def test_an_index_has_the_sizes_and_every_name(tmp_path: Path) -> None:
    put(tmp_path, tensors(), 3)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 72, "total_parameters": 18}
    assert index["weight_map"] == {n: f"model-0000{i}-of-00003.safetensors" for i, n in enumerate("abc", start=1)}


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        put(tmp_path, tensors(), 2)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in tmp_path.iterdir()} == {0o640}


def test_everything_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    counted: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checking_replace(source: Path, target: Path) -> None:
        waiting = [Path(source), *tmp_path.glob("*.overspill-*.safetensors")]
        assert {path.stat().st_ino for path in [*waiting, tmp_path]} <= synced
        counted.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", checking_replace)
    put(tmp_path, tensors(), 3)
    assert counted == [INDEX, INDEX]
    synced.clear()
    put(tmp_path, tensors(), 1)
    assert counted == [INDEX, INDEX, WHOLE]


def noted_steps(folder: Path, values: Tensors, files: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the folder's names, and when they are put on the disk."""
    steps: list[str] = []
    tag = re.compile(r"overspill-[0-9a-f]{8}")
    calls = {name: getattr(os, name) for name in ("fsync", "link", "replace", "unlink")}

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            steps.append("sync")
        calls["fsync"](descriptor)

    def noting(name: str) -> Callable[..., None]:
        def call(*paths: Path) -> None:
            if all(Path(path).exists() for path in paths[:1]):
                steps.append(f"{name} {tag.sub('aside', Path(paths[-1]).name)}")
            calls[name](*paths)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for name in ("link", "replace", "unlink"):
            patch.setattr(os, name, noting(name))
        put(folder, values, files)
    return steps


def test_each_step_is_on_the_disk_before_the_next_one_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [f"model-0000{n}-of-00002" for n in (1, 2)]
    assert noted_steps(tmp_path, tensors(), 2, monkeypatch) == [
        "sync",
        f"replace {INDEX}",
        "sync",
        *(f"link {shard}.safetensors" for shard in shards),
        "sync",
        f"replace {INDEX}",
        "sync",
        *(f"unlink {shard}.aside.safetensors" for shard in shards),
        "sync",
    ]
    steps = noted_steps(tmp_path, tensors(2.0), 1, monkeypatch)
    assert steps[:4] == ["sync", f"replace {WHOLE}", "sync", f"unlink {INDEX}"]
    assert sorted(steps[4:6]) == [f"unlink {shard}.safetensors" for shard in shards]
    assert steps[6:] == ["unlink model.aside.json", "sync"]


def test_where_there_are_no_hard_links_the_shards_keep_their_first_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def refuse(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:  # the first one works
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        shutil.copyfile(source, target)

    monkeypatch.setattr(os, "link", refuse)
    spots = put(tmp_path, tensors(), 3)
    assert {Path(file.path).name for file, _ in spots.values()} | {INDEX} == files_in(tmp_path)
    assert len(files_in(tmp_path)) == 4
    assert_holds(tmp_path, tensors())
    put(tmp_path, tensors(2.0), 1)
    assert files_in(tmp_path) == {WHOLE}


# ---------------------------------------------------------------- what is not ours


@pytest.mark.parametrize("files", [1, 3])
def test_shards_that_no_index_lists_are_someone_elses(files: int, tmp_path: Path) -> None:
    other = tmp_path / "model-00002-of-00003.safetensors"
    save_file({"mine": torch.ones(1)}, other)
    put(tmp_path, tensors(), files)
    assert set(load_file(other)) == {"mine"}
    assert_holds(tmp_path, tensors())
    put(tmp_path, tensors(2.0), files)
    assert set(load_file(other)) == {"mine"}
    assert len(files_in(tmp_path)) == (2 if files == 1 else 5)
    assert_holds(tmp_path, tensors(2.0))


@pytest.mark.parametrize("listed", ["../outside.safetensors", "config.json", "sub/x.safetensors", 7, [1], None])
@pytest.mark.parametrize("name", [INDEX, "model.overspill-0123abcd.json"])
def test_a_list_with_strange_names_makes_nothing_else_go(name: str, listed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    others = [tmp_path / "outside.safetensors", folder / "config.json", folder / "sub" / "x.safetensors"]
    for other in others:
        other.write_text("mine")
    (folder / name).write_text(json.dumps({"weight_map": {"a": listed}}))
    put(folder, tensors())
    assert [other.read_text() for other in others] == ["mine"] * 3
    assert files_in(folder) == {WHOLE, "config.json", "sub"}


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"weight_map": 3}', '{"weight_map": []}', "\ud800"])
def test_an_index_that_cannot_be_read_is_replaced(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogatepass"))
    put(tmp_path, tensors())
    assert files_in(tmp_path) == {WHOLE}


@pytest.mark.parametrize(
    "name", ["config.json", "weights.safetensors", "pytorch_model.bin", "model.pt", "x.index.json"]
)
def test_a_folder_with_a_checkpoint_of_any_kind_will_do(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / "readme.md").write_text("mine")
    put(tmp_path, tensors())
    assert files_in(tmp_path) == {WHOLE, name, "readme.md"}


def test_a_folder_of_other_things_is_refused_by_their_names(tmp_path: Path) -> None:
    for name in ("a.txt", "b.py", "c"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(SaveError, match=r"holds a\.txt, b\.py, c and no checkpoint"):
        put(tmp_path, tensors())
    assert files_in(tmp_path) == {"a.txt", "b.py", "c"}


# ---------------------------------------------------------------- leftovers


def aside(stem: str = "model", kind: str = "safetensors") -> str:
    return f"{stem}.overspill-0123abcd.{kind}"


@pytest.mark.parametrize("files", [1, 3])
def test_what_a_killed_save_left_is_removed(files: int, tmp_path: Path) -> None:
    put(tmp_path, tensors(5.0), 2)
    for name in (aside(), aside("model-00001-of-00009"), aside("model-100000-of-100000"), aside(kind="json")):
        (tmp_path / name).write_text("half")
    put(tmp_path, tensors(), files)
    assert files_in(tmp_path) == ({WHOLE} if files == 1 else SHARDS)
    assert_holds(tmp_path, tensors())


def test_a_folder_of_leftovers_alone_will_do(tmp_path: Path) -> None:
    (tmp_path / aside("model-00001-of-00009")).write_text("half")
    put(tmp_path, tensors())
    assert files_in(tmp_path) == {WHOLE}


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    names = {"model.overspill-0123abcd.txt", "my-" + aside(), "model.overspill-0123.safetensors", aside() + ".bak"}
    put(tmp_path, tensors(5.0))
    for name in names:
        (tmp_path / name).write_text("mine")
    put(tmp_path, tensors())
    assert files_in(tmp_path) == {WHOLE, *names}


def test_shards_under_first_names_are_no_leftovers_while_the_index_lists_them(tmp_path: Path) -> None:
    """A save was killed right after its one step that counts; the next one fails."""
    put(tmp_path, tensors(), 3)
    index = json.loads((tmp_path / INDEX).read_text())
    for key, name in index["weight_map"].items():
        index["weight_map"][key] = aside(name.removesuffix(".safetensors"))
        (tmp_path / name).rename(tmp_path / index["weight_map"][key])
    (tmp_path / INDEX).write_text(json.dumps(index))

    def fail(writer: SafetensorsWriter, name: str) -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(SaveError, match="broken"):
        publish(tmp_path, layouts(tensors(2.0), 1), fail)
    assert_holds(tmp_path, tensors())
    put(tmp_path, tensors(2.0), 3)
    assert files_in(tmp_path) == SHARDS
    assert_holds(tmp_path, tensors(2.0))


def test_files_that_a_leftover_list_names_go_unless_the_checkpoint_has_them(tmp_path: Path) -> None:
    put(tmp_path, tensors(), 3)
    old = tmp_path / "model-00001-of-00007.safetensors"
    old.write_text("an old shard that was about to go")
    weight_map = {"a": old.name, "b": "model-00001-of-00003.safetensors"}
    (tmp_path / aside(kind="json")).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(KeyError):
        publish(tmp_path, layouts(tensors(), 1), nothing_to_fill_with)
    assert files_in(tmp_path) == SHARDS
    assert_holds(tmp_path, tensors())


# ---------------------------------------------------------------- failures


def test_a_file_in_the_place_of_the_folder_is_named_and_left(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(SaveError, match=r"model is a file, and a checkpoint is a folder\. Give another path"):
        put(tmp_path / "model", tensors())
    assert (tmp_path / "model").read_text() == "mine"


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("failing", "abc")
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), RuntimeError("x"), CheckpointError("y")], ids=repr
)
def test_a_failure_leaves_the_old_checkpoint_and_nothing_else(
    error: BaseException, failing: str, files: int, tmp_path: Path
) -> None:
    put(tmp_path, tensors(), 2)
    before = {SourceFile.at(path) for path in tmp_path.iterdir()}
    values = tensors(2.0)

    def fill(writer: SafetensorsWriter, name: str) -> None:
        if name == failing:
            raise error
        filling(values)(writer, name)

    with pytest.raises(SaveError if isinstance(error, OSError) else type(error)) as raised:
        publish(tmp_path, layouts(values, files), fill)
    if isinstance(error, OSError):
        assert str(tmp_path) in str(raised.value)
        assert "full" in str(raised.value)
        assert "The checkpoint that was there is whole" in str(raised.value)
    assert {SourceFile.at(path) for path in tmp_path.iterdir()} == before
    put(tmp_path, values, files)
    assert_holds(tmp_path, values)


def test_space_is_asked_for_once_leftovers_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / aside()).write_text("half")
    usage = shutil.disk_usage(tmp_path)
    need = sum(layout.nbytes for layout in layouts(tensors(), 3)) + 4 * 2**20
    free = [need - 1]

    def disk_usage(folder: Path) -> Any:
        assert files_in(folder) <= {WHOLE}
        return usage._replace(free=free[0])

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with pytest.raises(SaveError, match=r"needs 4\.\d\d MiB in .* where 4\.\d\d MiB are free"):
        put(tmp_path, tensors(), 3)
    free[0] += 1
    put(tmp_path, tensors(), 3)
    assert_holds(tmp_path, tensors())


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_target_that_is_no_folder(make: Callable[[Path], None], tmp_path: Path) -> None:
    target = tmp_path / "target"
    make(target)
    with pytest.raises(SaveError, match="target"):
        put(target, tensors())
    assert files_in(tmp_path) == {"target"}
    target.unlink()
    put(target, tensors())


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    put(tmp_path / "link", tensors(), 2)
    assert (tmp_path / "link").is_symlink()
    assert_holds(tmp_path / "real", tensors())


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / WHOLE).mkdir()
    with pytest.raises(SaveError, match="putting the checkpoint in place"):
        put(tmp_path, tensors())
    assert files_in(tmp_path) == {WHOLE}


# ---------------------------------------------------------------- two at once


def test_another_save_to_the_folder_is_waited_for_by_the_user(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another process would hold it
    with pytest.raises(SaveError, match=r"another save to .* is under way"):
        put(tmp_path, tensors())
    assert files_in(tmp_path) == set()
    os.close(descriptor)
    put(tmp_path, tensors())
    assert_holds(tmp_path, tensors())


def test_another_thread_that_saves_to_the_folder(tmp_path: Path) -> None:
    values, refused, begun, go_on = tensors(), [], threading.Event(), threading.Event()

    def slow(writer: SafetensorsWriter, name: str) -> None:
        begun.set()
        assert go_on.wait(60)
        filling(values)(writer, name)

    thread = threading.Thread(target=publish, args=(tmp_path, layouts(values, 2), slow))
    thread.start()
    assert begun.wait(60)
    written = files_in(tmp_path)
    try:
        put(tmp_path, tensors(2.0))
    except SaveError as error:
        refused.append(error)
    assert files_in(tmp_path) == written, "the other one's files are no leftovers"
    go_on.set()
    thread.join(60)
    assert len(refused) == 1
    assert_holds(tmp_path, values)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    put(tmp_path, tensors(), 2)
    assert_holds(tmp_path, tensors())


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    put(tmp_path, tensors(), 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for files in (1, 3):
        put(tmp_path, tensors(), files)
        with pytest.raises(KeyError):
            publish(tmp_path, layouts(tensors(), files), nothing_to_fill_with)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
