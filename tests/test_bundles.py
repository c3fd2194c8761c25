"""The files of offloaded modules: what lies in them, whose they are, and that nobody else's are touched."""

import contextlib
import errno
import fcntl
import gc
import itertools
import json
import os
import resource
import shutil
import stat
import tempfile
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overspill import bundles
from overspill.bundles import Bundle, BundleTensor, OffloadRoot
from overspill.checkpoint import SourceFile, open_checkpoint
from overspill.checkpoint.safetensors_header import DTYPES
from overspill.errors import CheckpointError, CheckpointReadError, OffloadFolderError, StateError
from overspill.tensors import TensorSpec
from support import run_program

UNNAMED = [torch.complex128, torch.complex32, torch.float4_e2m1fn_x2]
SHAPES: list[tuple[int, ...]] = [(), (3, 5), (0,), (2, 0, 3)]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).clone()


def given(name: str, tensor: torch.Tensor) -> BundleTensor:
    strides = None if tensor.is_contiguous() else tensor.stride()
    return BundleTensor(name, TensorSpec.of(tensor), strides, lambda: flat_bytes(tensor))


def random_bits(spec: TensorSpec) -> BundleTensor:
    data = torch.randint(0, 2 if spec.dtype is torch.bool else 256, (spec.nbytes,), dtype=torch.uint8)
    return BundleTensor(str(spec.dtype), spec, None, lambda: data)


def module_of(value: float, *, size: int = 10) -> list[BundleTensor]:
    return [given("weight", torch.full((size, 10), value)), given("bias", torch.full((3,), -value))]


def failing(name: str, error: BaseException) -> BundleTensor:
    def read() -> torch.Tensor:
        raise error

    return BundleTensor(name, TensorSpec((10,), torch.float32), None, read)


def read_back(bundle: Bundle, tensor: BundleTensor) -> bytes:
    """The tensor's bytes, from nothing but what the bundle says."""
    with bundle.file.path.open("rb") as file:
        bundle.file.check(file.fileno())
        file.seek(bundle.offsets[tensor.name])
        return file.read(tensor.spec.nbytes)


def assert_holds(bundle: Bundle, tensors: list[BundleTensor]) -> None:
    assert set(bundle.offsets) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        assert read_back(bundle, tensor) == bytes(tensor.read().tolist()), tensor.name


def content(folder: Path) -> dict[str, bytes | None]:
    """Every path below `folder`, with what is in it; None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def index_of(bundle: Bundle) -> dict[str, Any]:
    return json.loads((bundle.folder / "index.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "offload"


@pytest.fixture
def root(folder: Path) -> OffloadRoot:
    return OffloadRoot(folder, fingerprint="me")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, empty."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Within, the kernel refuses writes past `nbytes` of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


PRELUDE = """
import gc, os, signal, sys, tempfile
from pathlib import Path
import torch
from overspill.bundles import BundleTensor, OffloadRoot
from overspill.errors import OffloadFolderError
from overspill.tensors import TensorSpec
tensors = [BundleTensor("weight", TensorSpec((8,), torch.uint8), None, lambda: torch.ones(8, dtype=torch.uint8))]
"""


def run(program: str, *arguments: object) -> str:
    return run_program(f"{PRELUDE}arguments = {[*map(str, arguments)]!r}\n{textwrap.dedent(program)}")


# ---------------------------------------------------------------- what lies in the files


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_comes_back_through_its_offset_and_through_safetensors(
    shape: tuple[int, ...], root: OffloadRoot
) -> None:
    tensors = [random_bits(TensorSpec(shape, dtype)) for dtype in [*DTYPES.values(), *UNNAMED]]
    [bundle] = root.write({"model.layers.0": tensors})
    assert_holds(bundle, tensors)
    assert bundle.nbytes == sum(tensor.spec.nbytes for tensor in tensors)

    found = load_file(bundle.file.path)
    for tensor in tensors:
        theirs = found[tensor.name]
        if tensor.spec.dtype not in UNNAMED:
            assert TensorSpec.of(theirs) == tensor.spec
        assert bytes(flat_bytes(theirs).tolist()) == bytes(tensor.read().tolist())
    recorded = {entry["name"]: entry for entry in index_of(bundle)["tensors"]}
    for tensor in tensors:
        assert recorded[tensor.name] == {
            "name": tensor.name,
            "dtype": str(tensor.spec.dtype).removeprefix("torch."),
            "shape": list(shape),
            "offset": bundle.offsets[tensor.name],
            "nbytes": tensor.spec.nbytes,
        }


def test_a_tensor_that_is_not_in_order_keeps_its_strides_and_is_true_to_any_reader(root: OffloadRoot) -> None:
    transposed = torch.arange(12.0).reshape(3, 4).t()
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = [given("t", transposed), given("c", channels_last)]
    [bundle] = root.write({"conv": tensors})
    assert_holds(bundle, tensors)
    recorded = {entry["name"]: (entry["shape"], entry["strides"]) for entry in index_of(bundle)["tensors"]}
    assert recorded == {"t": ([4, 3], [1, 4]), "c": ([2, 3, 4, 5], list(channels_last.stride()))}
    found = load_file(bundle.file.path)
    assert torch.equal(found["t"].t(), transposed)
    assert torch.equal(found["c"].permute(0, 3, 1, 2), channels_last)


def test_a_bundle_says_where_it_lies_and_whose_it_is(root: OffloadRoot, folder: Path) -> None:
    tensors = module_of(1.0)
    [bundle] = root.write({"model.layers.3": tensors})
    assert root.path == folder
    assert (bundle.module, bundle.folder) == ("model.layers.3", folder / "model.layers.3")
    assert bundle.file == SourceFile.at(folder / "model.layers.3" / "tensors.safetensors")
    assert set(content(folder)) == {
        "overspill.json",
        "model.layers.3",
        "model.layers.3/tensors.safetensors",
        "model.layers.3/index.json",
    }
    mark, index = json.loads((folder / "overspill.json").read_text()), index_of(bundle)
    assert (mark["made by"], mark["format"], mark["fingerprint"]) == ("overspill", 1, "me")
    assert (index["made by"], index["format"], index["fingerprint"]) == ("overspill", 1, "me")
    assert index["module"] == "model.layers.3"
    assert open_checkpoint(bundle.file.path)["weight"].offset == bundle.offsets["weight"]


def test_tensors_start_on_a_page_or_at_least_on_64_bytes_where_sizes_allow(root: OffloadRoot) -> None:
    sizes = {"scale": 1, "odd": 7, "norm": 64, "weight": 4096, "other": 8192}
    tensors = [given(name, torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()]
    [bundle] = root.write({"block": tensors})
    assert bundle.offsets["weight"] % 4096 == bundle.offsets["other"] % 4096 == 0
    assert bundle.offsets["norm"] % 64 == 0


def test_a_module_without_tensors_has_a_bundle_too(root: OffloadRoot) -> None:
    [bundle] = root.write({"empty": []})
    assert (bundle.nbytes, dict(bundle.offsets), load_file(bundle.file.path)) == (0, {}, {})


def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = OffloadRoot(tmp_path / "parent" / "offload", fingerprint="me")
        root.write({"a": module_of(1.0)})
    finally:
        os.umask(before)
    for path in (root.path, *root.path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_only_one_tensor_is_in_memory_at_a_time(root: OffloadRoot) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def read() -> torch.Tensor:
        nonlocal most
        data = torch.zeros(64, dtype=torch.uint8)
        alive.append(weakref.ref(data))
        most = max(most, sum(reference() is not None for reference in alive))
        return data

    spec = TensorSpec((64,), torch.uint8)
    root.write({module: [BundleTensor(name, spec, None, read) for name in "xyz"] for module in "ab"})
    assert (len(alive), most) == (6, 1)
    assert all(reference() is None for reference in alive)


# ---------------------------------------------------------------- names

ODD_NAMES = [
    "",
    "%root",
    "root",
    ".",
    "..",
    "...",
    ".hidden",
    "%2Ehidden",
    "a/b",
    "a%2Fb",
    "a\\b",
    "a\0b",
    "a%00b",
    "overspill.json",
    "%6Fverspill.json",
    "A.b",
    "a.b",
    "with space",
    "größe",
    "half \ud800",
    "CON",
    "~",
    "*?:<>|",
    "new\nline",
    "long." * 100,
    "long." * 100 + "1",
    "ü" * 100,
    "x" * 200,
    "x" * 201,
    "x" * 255,
]


def test_modules_of_any_name_have_folders_of_their_own(root: OffloadRoot, folder: Path) -> None:
    modules = {name: module_of(float(number)) for number, name in enumerate(ODD_NAMES)}
    written = root.write(modules)
    assert [bundle.module for bundle in written] == ODD_NAMES
    assert len({bundle.folder for bundle in written}) == len(ODD_NAMES)
    for bundle in written:
        assert bundle.folder.parent == folder
        assert not bundle.folder.name.startswith(".")
        assert len(os.fsencode(bundle.folder.name)) <= 255
        assert index_of(bundle)["module"] == bundle.module
        assert_holds(bundle, modules[bundle.module])
    assert len(list(folder.iterdir())) == len(ODD_NAMES) + 1
    root.remove(written)
    assert not folder.exists()


def test_a_plain_path_is_the_folders_name(root: OffloadRoot) -> None:
    [bundle] = root.write({"model.layers.10.self_attn-x": []})
    assert bundle.folder.name == "model.layers.10.self_attn-x"


@pytest.mark.parametrize("name", ["__metadata__", "half \ud800"])
def test_a_tensor_name_that_no_file_can_hold_is_refused_before_anything_is_written(
    name: str, root: OffloadRoot, folder: Path
) -> None:
    with pytest.raises(CheckpointError, match="Rename the tensor"):
        root.write({"a": module_of(1.0), "b": [given(name, torch.zeros(1))]})
    assert not folder.exists()


# ---------------------------------------------------------------- whose folder it is


def test_a_folder_of_another_model_is_refused(root: OffloadRoot, folder: Path) -> None:
    root.write({"a": module_of(1.0)})
    for closed in (False, True):
        if closed:
            root.close()
        before = content(folder)
        with pytest.raises(OffloadFolderError, match=r"belongs to another model\. Pass another folder") as error:
            OffloadRoot(folder, fingerprint="somebody else")
        assert str(folder) in str(error.value)
        assert content(folder) == before


def test_a_folder_that_a_living_root_uses_is_refused_to_the_same_model(root: OffloadRoot, folder: Path) -> None:
    [bundle] = root.write({"a": module_of(1.0)})
    with pytest.raises(OffloadFolderError, match=r"in use.*Pass another folder") as error:
        OffloadRoot(folder, fingerprint="me")
    assert str(folder) in str(error.value)
    assert_holds(bundle, module_of(1.0))
    root.write({"b": module_of(2.0)})


@pytest.mark.parametrize("end", ["close", "death"])
def test_what_a_root_leaves_in_a_users_folder_is_taken_over_by_the_same_model(end: str, folder: Path) -> None:
    root = OffloadRoot(folder, fingerprint="me")
    root.write({"a": module_of(1.0), "b": module_of(2.0)})
    before = content(folder)
    if end == "close":
        root.close()
    del root
    gc.collect()
    assert content(folder) == before, "files in a user's folder stay"

    second = OffloadRoot(folder, fingerprint="me")
    assert content(folder) == before
    [bundle] = second.write({"a": module_of(3.0)})
    assert_holds(bundle, module_of(3.0))
    after = content(folder)
    assert {name for name in before if before[name] != after[name]} == {"a/tensors.safetensors"}
    assert set(after) == set(before)


def test_a_folder_with_other_things_in_it_is_used_and_they_stay(folder: Path) -> None:
    (folder / "theirs").mkdir(parents=True)
    (folder / "theirs" / "index.json").write_text('{"weight_map": {}}')
    (folder / "notes.txt").write_text("mine")
    folder.chmod(0o755)
    before = content(folder)
    root = OffloadRoot(folder, fingerprint="me")
    written = root.write({"a": module_of(1.0)})
    assert before.items() <= content(folder).items()
    root.remove(written)
    assert content(folder) == before
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


MARKS = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe\x00",
    "a list": b"[1]",
    "deep": b"[" * 4000,
    "of someone else": b'{"made by": "me", "format": 1, "fingerprint": "me"}',
    "of another format": b'{"made by": "overspill", "format": 2, "fingerprint": "me"}',
    "without a fingerprint": b'{"made by": "overspill", "format": 1}',
    "with an odd fingerprint": b'{"made by": "overspill", "format": 1, "fingerprint": 7}',
}


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_that_is_not_ours_is_refused_and_stays(mark: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "overspill.json").write_bytes(MARKS[mark])
    with pytest.raises(OffloadFolderError, match=r"overspill\.json cannot be read as the mark .* Pass another folder"):
        OffloadRoot(folder, fingerprint="me")
    assert content(folder) == {"overspill.json": MARKS[mark]}


def test_a_mark_that_the_system_gives_piece_by_piece_is_ours_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = OffloadRoot(folder, fingerprint="me")
    root.write({"a": []})
    root.close()
    pread, calls = os.pread, list[int]()

    def short(descriptor: int, nbytes: int, offset: int) -> bytes:
        calls.append(offset)
        return pread(descriptor, min(nbytes, 7), offset)

    monkeypatch.setattr(os, "pread", short)
    OffloadRoot(folder, fingerprint="me").close()
    assert len(calls) > 5


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "pipe"])
def test_a_mark_that_is_no_file_is_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    other = OffloadRoot(tmp_path / "other", fingerprint="me")
    other.write({"a": []})
    other.close()
    target, mark = tmp_path / "other" / "overspill.json", folder / "overspill.json"
    folder.mkdir()
    if kind == "folder":
        mark.mkdir()
    elif kind == "pipe":
        os.mkfifo(mark)
    else:
        mark.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    before, kept = os.lstat(mark), target.read_bytes()
    with pytest.raises(OffloadFolderError, match=r"overspill\.json is not a regular file"):
        OffloadRoot(folder, fingerprint="me")
    assert os.path.samestat(os.lstat(mark), before)
    assert target.read_bytes() == kept
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_folder_that_cannot_be_made_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OffloadFolderError, match="Pass another folder") as error:
        OffloadRoot(tmp_path / "file" / below, fingerprint="me")
    assert str(tmp_path / "file" / below) in str(error.value)
    assert content(tmp_path) == {"file": b"mine"}


def test_a_missing_temporary_folder_is_our_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OffloadFolderError, match="making a temporary folder failed"):
        OffloadRoot(None, fingerprint="me")


def test_a_mark_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    with files_of_at_most(10), pytest.raises(OffloadFolderError, match=r"overspill\.json failed \(File too large\)"):
        OffloadRoot(folder, fingerprint="me")
    assert not folder.exists()
    OffloadRoot(folder, fingerprint="me")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_named(folder: Path) -> None:
    folder.mkdir(mode=0o500)
    with pytest.raises(OffloadFolderError, match="Permission denied"):
        OffloadRoot(folder, fingerprint="me")


def test_a_file_system_that_cannot_lock_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(bundles.fcntl, "flock", refuse)
    with pytest.raises(OffloadFolderError, match=r"overspill\.json failed \(Function not implemented\)"):
        OffloadRoot(folder, fingerprint="me")
    assert not folder.exists()


def test_a_mark_that_its_owner_removes_in_the_same_instant_is_made_anew(
    root: OffloadRoot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = bundles.try_lock, itertools.count()

    def lock_late(descriptor: int) -> bool:
        if next(calls) == 0:
            root.close()  # between the other one's look at the mark and its lock
        return real(descriptor)

    monkeypatch.setattr(bundles, "try_lock", lock_late)
    folder.joinpath("theirs").touch()  # so that the folder stays
    second = OffloadRoot(folder, fingerprint="me")
    with pytest.raises(OffloadFolderError, match="in use"):
        OffloadRoot(folder, fingerprint="me")
    second.write({"a": []})


def test_a_mark_that_somebody_deletes_is_made_again_by_the_next_write(root: OffloadRoot, folder: Path) -> None:
    root.write({"a": module_of(1.0)})
    (folder / "overspill.json").unlink()
    root.write({"b": module_of(2.0)})
    with pytest.raises(OffloadFolderError, match="in use"):
        OffloadRoot(folder, fingerprint="me")
    shutil.rmtree(folder)
    [bundle] = root.write({"a": module_of(3.0)})
    assert_holds(bundle, module_of(3.0))


@pytest.mark.parametrize("noticed", [True, False])
def test_a_folder_that_went_to_another_model_is_not_taken_back(noticed: bool, root: OffloadRoot, folder: Path) -> None:
    written = root.write({"a": module_of(1.0)})
    shutil.rmtree(folder)
    other = OffloadRoot(folder, fingerprint="somebody else")
    [theirs] = other.write({"a": module_of(2.0)})
    if noticed:
        with pytest.raises(OffloadFolderError, match="belongs to another model"):
            root.write({"a": module_of(3.0)})
    root.remove(written)
    root.close()
    assert_holds(theirs, module_of(2.0))
    assert (folder / "overspill.json").exists()


def test_a_mark_that_another_process_is_about_to_write_is_in_use(folder: Path) -> None:
    folder.mkdir()
    with (folder / "overspill.json").open("wb") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        with pytest.raises(OffloadFolderError, match="in use"):
            OffloadRoot(folder, fingerprint="me")


# ---------------------------------------------------------------- whose a module's folder is


def our_index(fingerprint: str = "me", module: str = "a") -> str:
    return json.dumps(
        {"made by": "overspill", "format": 1, "fingerprint": fingerprint, "module": module, "tensors": []}
    )


FOREIGN = {
    "a file of theirs": {"notes.txt": "mine"},
    "tensors without an index": {"tensors.safetensors": "mine"},
    "an index of theirs": {"index.json": '{"fingerprint": "me", "module": "a"}'},
    "an index that is broken": {"index.json": "{", "tensors.safetensors": "mine"},
    "another model's index": {"index.json": our_index(fingerprint="somebody else")},
    "another module's index": {"index.json": our_index(module="b")},
    "another model's index, with ours half-made": {"index.json": our_index("no"), "index.json.partial": our_index()},
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_module_folder_that_is_not_ours_is_refused_and_stays(what: str, root: OffloadRoot, folder: Path) -> None:
    [kept] = root.write({"z": module_of(1.0)})
    (folder / "a").mkdir()
    for name, text in FOREIGN[what].items():
        (folder / "a" / name).write_text(text)
    before = content(folder)
    with pytest.raises(OffloadFolderError, match=r"is in the way.*Pass another folder") as error:
        root.write({"y": module_of(2.0), "a": module_of(2.0)})
    assert str(folder / "a") in str(error.value)
    assert content(folder) == before
    assert_holds(kept, module_of(1.0))


@pytest.mark.parametrize("kind", ["link", "file", "index that is a link", "index that is a pipe"])
def test_a_module_folder_behind_a_link_is_refused(kind: str, root: OffloadRoot, folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "index.json").write_text(our_index())
    if kind == "link":
        (folder / "a").symlink_to(theirs)
    elif kind == "file":
        (folder / "a").write_text("mine")
    else:
        (folder / "a").mkdir()
        if kind == "index that is a link":
            (folder / "a" / "index.json").symlink_to(theirs / "index.json")
        else:
            os.mkfifo(folder / "a" / "index.json")
    with pytest.raises(OffloadFolderError, match="offload/a is in the way"):
        root.write({"a": module_of(1.0)})
    assert content(theirs) == {"index.json": our_index().encode()}
    assert os.path.lexists(folder / "a")


def test_links_in_the_places_of_our_files_are_replaced_not_followed(
    root: OffloadRoot, folder: Path, tmp_path: Path
) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "index.json").write_text(our_index())
    (tmp_path / "theirs").write_text("mine")
    for name in ("tensors.safetensors", "tensors.safetensors.partial", "index.json.old"):
        (folder / "a" / name).symlink_to(tmp_path / "theirs")
    [bundle] = root.write({"a": module_of(1.0)})
    assert_holds(bundle, module_of(1.0))
    assert set(content(bundle.folder)) == {"tensors.safetensors", "index.json"}
    assert not bundle.file.path.is_symlink()
    assert (tmp_path / "theirs").read_text() == "mine"


def test_an_empty_folder_of_a_modules_name_is_used(root: OffloadRoot, folder: Path) -> None:
    (folder / "a").mkdir()
    [bundle] = root.write({"a": module_of(1.0)})
    assert_holds(bundle, module_of(1.0))


def test_what_someone_puts_into_a_modules_folder_stays(root: OffloadRoot, folder: Path) -> None:
    written = root.write({"a": module_of(1.0)})
    (folder / "a" / "notes.txt").write_text("mine")
    [again] = root.write({"a": module_of(2.0)})
    assert_holds(again, module_of(2.0))
    root.remove([*written, again])
    assert content(folder) == {"a": None, "a/notes.txt": b"mine"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of runs that were killed over a second write, which was to replace `old` and to add `new`."""
    program = """
        def killed(folder, when):
            root = OffloadRoot(folder, fingerprint="me")
            root.write({"old": tensors})
            die = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
            if when == "writing":
                last = BundleTensor("last", TensorSpec((8,), torch.uint8), None, die)
            else:
                last, Path.replace = tensors[0], die
            root.write({"new": tensors, "old": [last]})

        for when in ("writing", "renaming"):
            if os.fork() == 0:
                killed(Path(arguments[0], when), when)
            assert os.wait()[1] == signal.SIGKILL
    """
    path = tmp_path_factory.mktemp("killed")
    run(program, path)
    return path


@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_a_run_that_is_killed_blocks_nothing_and_leaves_old_bundles_whole(when: str, killed: Path) -> None:
    folder = killed / when
    assert (folder / "new" / "tensors.safetensors.partial").exists()
    assert load_file(folder / "old" / "tensors.safetensors")["weight"].tolist() == [1] * 8
    root = OffloadRoot(folder, fingerprint="me")
    modules = {"new": module_of(1.0), "old": module_of(2.0)}
    written = root.write(modules)
    for bundle in written:
        assert_holds(bundle, modules[bundle.module])
        assert set(content(bundle.folder)) == {"tensors.safetensors", "index.json"}
    root.remove(written)
    assert not folder.exists(), "the first run made it, and says so in the mark"


# ---------------------------------------------------------------- all or nothing


def test_a_folder_without_space_is_refused_before_anything_is_read_or_written(
    root: OffloadRoot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [old] = root.write({"a": module_of(1.0)})
    before = content(folder)
    usage = shutil.disk_usage(folder)
    large = BundleTensor("large", TensorSpec((1 << 20,), torch.uint8), None, lambda: pytest.fail("was read"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(OffloadFolderError, match=r"need 1\.02 MiB in .*offload, where 1\.00 MiB are free: 2\d\.00 KiB"):
        root.write({"a": [large], "b": module_of(1.0)})
    assert content(folder) == before
    assert_holds(old, module_of(1.0))


def with_full_disk(patch: pytest.MonkeyPatch, nth: int) -> None:
    """From the `nth` write on, the disk is full."""
    writes, real = itertools.count(), bundles.write_all

    def write_all(*args: Any) -> None:
        if next(writes) >= nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    patch.setattr(bundles, "write_all", write_all)
    patch.setattr("overspill.checkpoint.writer.write_all", write_all)


def with_failing_sync(patch: pytest.MonkeyPatch, nth: int) -> None:
    syncs, real = itertools.count(), os.fsync

    def fsync(descriptor: int) -> None:
        if next(syncs) >= nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    patch.setattr(os, "fsync", fsync)


def with_failing_call(owner: object, name: str) -> Callable[[pytest.MonkeyPatch, int], None]:
    def install(patch: pytest.MonkeyPatch, nth: int) -> None:
        calls, real = itertools.count(), getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == nth:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    return install


# Each of three modules takes: an index and two tensors behind a header (4 writes), one sync, two renames; one of them
# is new and needs a folder, and opens two files.
FAULTS = [
    *((with_full_disk, nth, "No space left on device") for nth in range(12)),
    *((with_failing_sync, nth, "Input/output error") for nth in range(3)),
    *((with_failing_call(Path, "replace"), nth, "Read-only file system") for nth in range(6)),
    *((with_failing_call(Path, "mkdir"), nth, "Read-only file system") for nth in range(3)),
    *((with_failing_call(bundles, "private_file"), nth, "Read-only file system") for nth in range(3)),
]


@pytest.mark.parametrize(("fault", "nth", "reason"), FAULTS)
def test_whatever_fails_the_old_bundles_stand_and_nothing_new_is_left(
    fault: Callable[[pytest.MonkeyPatch, int], None],
    nth: int,
    reason: str,
    root: OffloadRoot,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = root.write({"a": module_of(1.0), "c": module_of(1.0)})
    before = content(folder)
    new = {name: module_of(2.0, size=20) for name in "abc"}
    with monkeypatch.context() as patch:
        fault(patch, nth)
        with pytest.raises(OffloadFolderError, match=rf"offload/[abc]/\S+ failed \({reason}\)"):
            root.write(new)
    assert content(folder) == before
    for bundle in old:
        assert_holds(bundle, module_of(1.0))
    for bundle in root.write(new):
        assert_holds(bundle, new[bundle.module])
    assert set(content(folder)) == {
        "overspill.json",
        *(f"{m}{f}" for m in "abc" for f in ("", "/tensors.safetensors", "/index.json")),
    }


def test_a_file_that_the_kernel_refuses_is_named_with_its_tensor(root: OffloadRoot, folder: Path) -> None:
    with (
        files_of_at_most(5000),
        pytest.raises(OffloadFolderError, match=r"writing large to .*offload/a/tensors\.safetensors failed \(File too"),
    ):
        root.write({"a": [given("large", torch.zeros(5000))]})
    assert not folder.exists(), "a first write that fails leaves nothing at all"
    root.write({"a": module_of(1.0)})


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (
            RuntimeError("boom"),
            OffloadFolderError,
            r"writing broken to .*b/tensors.safetensors failed \(RuntimeError: bo",
        ),
        (OSError("no errno"), OffloadFolderError, r"writing broken to .*b/tensors.safetensors failed \(no errno\)"),
        (CheckpointReadError("theirs"), CheckpointReadError, "^theirs$"),
        (StateError("theirs"), StateError, "^theirs$"),
        (KeyboardInterrupt("theirs"), KeyboardInterrupt, "^theirs$"),
        (SystemExit("theirs"), SystemExit, "^theirs$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
@pytest.mark.parametrize("first", [True, False], ids=["at first", "over an old one"])
def test_an_exception_of_a_tensor_leaves_everything_as_it_was(
    first: bool, error: BaseException, raised: type[BaseException], says: str, root: OffloadRoot, folder: Path
) -> None:
    old = [] if first else root.write({"a": module_of(1.0), "b": module_of(1.0)})
    before = content(folder)
    new = {"a": module_of(2.0), "b": [*module_of(2.0), failing("broken", error)], "c": module_of(2.0)}
    with pytest.raises(raised, match=says) as caught:
        root.write(new)
    if raised is OffloadFolderError:
        assert caught.value.__cause__ is error
    assert (not folder.exists()) if first else (content(folder) == before)
    for bundle in old:
        assert_holds(bundle, module_of(1.0))
    root.write({"a": module_of(3.0)})


@pytest.mark.parametrize("nth", range(4))
def test_an_interrupt_between_two_renames_brings_the_old_files_back(
    nth: int, root: OffloadRoot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = root.write({"a": module_of(1.0)})
    before = content(folder)
    real, calls = Path.replace, itertools.count()

    def replace(path: Path, target: Path) -> Path:
        result = real(path, target)
        if next(calls) == nth:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        root.write({"a": module_of(2.0), "b": module_of(2.0)})
    assert content(folder) == before
    assert_holds(old[0], module_of(1.0))


def test_bytes_of_another_number_than_the_spec_says_are_refused(root: OffloadRoot, folder: Path) -> None:
    short = BundleTensor("short", TensorSpec((4,), torch.float32), None, lambda: torch.zeros(15, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"short, float32\[4\].* 15 of the 16 bytes"):
        root.write({"a": [short]})
    assert not folder.exists()


@pytest.mark.parametrize(
    "data",
    [torch.zeros(4), torch.zeros(16, dtype=torch.uint8, device="meta"), torch.zeros(32, dtype=torch.uint8)[::2]],
    ids=["typed", "elsewhere", "with gaps"],
)
def test_what_is_not_flat_bytes_in_memory_is_not_written(data: torch.Tensor, root: OffloadRoot) -> None:
    tensor = BundleTensor("odd", TensorSpec((4,), torch.float32), None, lambda: data)
    with pytest.raises(OffloadFolderError, match="AssertionError: odd is no bytes"):
        root.write({"a": [tensor]})


# ---------------------------------------------------------------- again


@pytest.mark.parametrize("hard_links", [True, False])
def test_the_old_file_stands_until_the_new_one_does(
    hard_links: bool, root: OffloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hard_links:
        with_failing_call(os, "link")(monkeypatch, 0)
    [old] = root.write({"a": module_of(1.0)})
    seen = []

    def read() -> torch.Tensor:
        seen.append(read_back(old, module_of(1.0)[0]))
        return torch.zeros(40, dtype=torch.uint8)

    [new] = root.write({"a": [BundleTensor("weight", TensorSpec((10,), torch.float32), None, read)]})
    assert seen == [bytes(module_of(1.0)[0].read().tolist())]
    assert new.file != old.file
    assert read_back(new, BundleTensor("weight", TensorSpec((10,), torch.float32), None, read)) == bytes(40)
    assert set(content(new.folder)) == {"tensors.safetensors", "index.json"}


def test_without_hard_links_a_failing_rename_still_brings_the_old_file_back(
    root: OffloadRoot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [old] = root.write({"a": module_of(1.0)})
    before = content(folder)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with_failing_call(Path, "replace")(monkeypatch, 1)
    with pytest.raises(OffloadFolderError):
        root.write({"a": module_of(2.0)})
    assert content(folder) == before
    assert_holds(old, module_of(1.0))


def test_a_reader_that_has_the_old_file_open_keeps_reading_it(root: OffloadRoot) -> None:
    [old] = root.write({"a": module_of(1.0)})
    with old.file.path.open("rb") as file:
        root.write({"a": module_of(2.0)})
        old.file.check(file.fileno())
        file.seek(old.offsets["weight"])
        assert file.read(400) == bytes(module_of(1.0)[0].read().tolist())


def test_removing_a_bundle_that_was_replaced_leaves_the_new_one(temporary: Path) -> None:
    root = OffloadRoot(None, fingerprint="me")
    [old] = root.write({"a": module_of(1.0)})
    [new] = root.write({"a": module_of(2.0)})
    root.remove([old])
    assert_holds(new, module_of(2.0))
    assert new.index.path.exists()
    root.close()
    assert content(temporary) == {}, "the new one went with its root"


# ---------------------------------------------------------------- removing


def test_removing_takes_exactly_the_bundles_files(root: OffloadRoot, folder: Path) -> None:
    a, b = root.write({"a": module_of(1.0), "b": module_of(2.0)})
    before = content(folder)
    root.remove([a])
    assert content(folder) == {name: data for name, data in before.items() if not name.startswith("a")}
    assert_holds(b, module_of(2.0))
    root.remove([b])
    assert not folder.exists()
    [again] = root.write({"a": module_of(3.0)})
    assert_holds(again, module_of(3.0))


def test_a_root_that_someone_else_made_or_uses_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    root = OffloadRoot(tmp_path / "theirs", fingerprint="me")
    root.remove(root.write({"a": module_of(1.0)}))
    assert content(tmp_path) == {"theirs": None}

    root = OffloadRoot(tmp_path / "ours", fingerprint="me")
    written = root.write({"a": module_of(1.0)})
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    root.remove(written)
    assert content(tmp_path / "ours") == {"notes.txt": b"mine"}


@pytest.mark.parametrize("gone", ["tensors.safetensors", "index.json", "folder", "root"])
def test_removing_what_is_gone_already_is_fine(gone: str, root: OffloadRoot, folder: Path) -> None:
    written = root.write({"a": module_of(1.0), "b": module_of(2.0)})
    if gone == "folder":
        shutil.rmtree(folder / "a")
    elif gone == "root":
        shutil.rmtree(folder)
    else:
        (folder / "a" / gone).unlink()
    root.remove(written)
    assert not folder.exists()
    root.remove(written)


def test_a_file_in_the_place_of_ours_is_not_deleted(root: OffloadRoot, folder: Path) -> None:
    [bundle] = root.write({"a": module_of(1.0)})
    replacement = folder / "theirs"
    replacement.write_text("mine")
    replacement.rename(bundle.file.path)
    root.remove([bundle])
    assert content(folder) == {"a": None, "a/tensors.safetensors": b"mine"}


def test_a_file_with_the_number_of_ours_is_not_deleted(root: OffloadRoot) -> None:
    # As happens where ours was deleted: the file system gives its inode to the next file that is made.
    [bundle] = root.write({"a": module_of(1.0)})
    for path in (bundle.file.path, bundle.index.path):
        path.write_text("mine")
    root.remove([bundle])
    assert content(bundle.folder) == {"tensors.safetensors": b"mine", "index.json": b"mine"}


def test_a_file_that_cannot_be_deleted_is_named(root: OffloadRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    [bundle] = root.write({"a": module_of(1.0)})
    with monkeypatch.context() as patch:
        with_failing_call(Path, "unlink")(patch, 0)
        with pytest.raises(OffloadFolderError, match=r"deleting .*/a/tensors\.safetensors failed.*Delete it yourself"):
            root.remove([bundle])
    root.remove([bundle])
    assert not root.path.exists()


def test_the_mark_stays_while_an_earlier_runs_bundles_lie_there(folder: Path) -> None:
    first = OffloadRoot(folder, fingerprint="me")
    leftovers = first.write({"a": module_of(1.0)})
    first.close()
    second = OffloadRoot(folder, fingerprint="me")
    second.remove(second.write({"b": module_of(2.0)}))
    assert set(content(folder)) == {"overspill.json", "a", "a/tensors.safetensors", "a/index.json"}
    second.remove(leftovers)
    assert not folder.exists()


def test_closing_a_root_without_bundles_leaves_nothing(folder: Path) -> None:
    root = OffloadRoot(folder, fingerprint="me")
    root.close()
    root.close()
    assert not folder.exists()


def test_a_closed_root_writes_nothing_more(root: OffloadRoot, folder: Path) -> None:
    root.close()
    with pytest.raises(StateError, match="was closed"):
        root.write({"a": module_of(1.0)})
    assert not folder.exists()


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = OffloadRoot("offload", fingerprint="me")
    monkeypatch.chdir("/")
    [bundle] = root.write({"a": module_of(1.0)})
    assert bundle.folder == tmp_path / "offload" / "a"


# ---------------------------------------------------------------- temporary folders


@pytest.mark.parametrize("end", ["close", "death"])
def test_a_temporary_root_goes_with_its_object(end: str, temporary: Path) -> None:
    root = OffloadRoot(None, fingerprint="me")
    root.write({"a": module_of(1.0), "": module_of(2.0)})
    [path] = temporary.iterdir()
    assert root.path == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    if end == "close":
        root.close()
    del root
    gc.collect()
    assert content(temporary) == {}


def test_a_temporary_root_leaves_what_others_put_there(temporary: Path) -> None:
    root = OffloadRoot(None, fingerprint="me")
    root.write({"a": module_of(1.0), "b": module_of(2.0)})
    (root.path / "a" / "notes.txt").write_text("mine")
    name = root.path.name
    root.close()
    assert content(temporary) == {name: None, f"{name}/a": None, f"{name}/a/notes.txt": b"mine"}


def test_two_temporary_roots_of_one_model_do_not_meet(temporary: Path) -> None:
    first, second = (OffloadRoot(None, fingerprint="me") for _ in range(2))
    [bundle] = first.write({"a": module_of(1.0)})
    second.write({"a": module_of(2.0)})
    second.close()
    assert_holds(bundle, module_of(1.0))


def test_a_temporary_root_goes_with_its_last_bundle_and_comes_back_with_the_next(temporary: Path) -> None:
    root = OffloadRoot(None, fingerprint="me")
    root.remove(root.write({"a": module_of(1.0)}))
    assert content(temporary) == {}
    [bundle] = root.write({"a": module_of(2.0)})
    assert_holds(bundle, module_of(2.0))
    root.close()
    assert content(temporary) == {}


def test_a_failed_first_write_leaves_no_temporary_folder(temporary: Path) -> None:
    root = OffloadRoot(None, fingerprint="me")
    with pytest.raises(KeyboardInterrupt):
        root.write({"a": [failing("x", KeyboardInterrupt())]})
    assert content(temporary) == {}


# ---------------------------------------------------------------- processes and threads


def test_another_process_is_refused_a_folder_in_use_and_ends_without_a_trace(
    root: OffloadRoot, folder: Path, tmp_path: Path
) -> None:
    program = """
        for fingerprint in ("me", "somebody else"):
            try:
                OffloadRoot(arguments[0], fingerprint=fingerprint)
            except OffloadFolderError as error:
                print(error)
        tempfile.tempdir = arguments[1]
        root = OffloadRoot(None, fingerprint="me")
        root.write({"a": tensors})
        assert os.listdir(arguments[1])
    """
    (tmp_path / "tmp").mkdir()
    to_us, to_others = run(program, folder, tmp_path / "tmp").splitlines()
    assert f"{folder} is in use" in to_us
    assert f"{folder} belongs to another model" in to_others
    assert content(tmp_path / "tmp") == {}
    root.write({"a": module_of(1.0)})


def test_forked_children_neither_touch_their_parents_folder_nor_keep_its_lock(tmp_path: Path) -> None:
    program = """
        tempfile.tempdir = arguments[0]
        roots = [OffloadRoot(None, fingerprint="me"), OffloadRoot(arguments[1], fingerprint="me")]
        written = [root.write({"a": tensors}) for root in roots]
        child = os.fork()
        if child == 0:
            for root, bundles in zip(roots, written):
                root.remove(bundles)
                root.close()
                try:
                    root.write({"b": tensors})
                    os._exit(1)
                except OffloadFolderError as error:
                    assert "forked" in str(error)
            del root, roots
            gc.collect()
            sys.exit(0)  # with all that Python does at its end
        assert os.waitpid(child, 0)[1] == 0
        for [bundle] in written:
            assert bundle.file.path.exists(), "the child removed it"
        try:
            OffloadRoot(arguments[1], fingerprint="me")
        except OffloadFolderError as error:
            assert "in use" in str(error)
        else:
            sys.exit("the child has let go of the lock")

        child = os.fork()
        if child == 0:
            signal.pause()
        roots.pop().close()
        OffloadRoot(arguments[1], fingerprint="me")  # the child, which lives, does not keep the lock
        os.kill(child, signal.SIGKILL)
        os.wait()
    """
    (tmp_path / "tmp").mkdir()
    run(program, tmp_path / "tmp", tmp_path / "given")
    assert content(tmp_path / "tmp") == {}, "the parent's own end removes it"
    assert (tmp_path / "given" / "a" / "tensors.safetensors").exists()


def test_a_thread_waits_until_another_ones_write_is_done(root: OffloadRoot) -> None:
    written: list[Bundle] = []
    second = threading.Thread(target=lambda: written.extend(root.write({"a": module_of(2.0)})))

    def read() -> torch.Tensor:
        second.start()
        second.join(timeout=0.2)
        assert second.is_alive()
        return torch.zeros(8, dtype=torch.uint8)

    root.write({"a": [BundleTensor("weight", TensorSpec((8,), torch.uint8), None, read)]})
    second.join()
    assert_holds(written[0], module_of(2.0))


def test_threads_write_and_remove_side_by_side(root: OffloadRoot, folder: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                [bundle] = root.write({f"m{number}": module_of(float(turn))})
                assert_holds(bundle, module_of(float(turn)))
                root.remove([bundle])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not folder.exists()
