"""Files of torch.save with code, bombs or traps in them: nothing runs, nothing grows, and the error names the file."""

import collections
import io
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from fuzz_inputs import NO_HOOKS, PROTOCOL, STATE_DICT, STOP, STORAGE, TENSOR, MakesAFolder, archive_of, calling, text
from overspill.checkpoint import open_checkpoint, pickled
from overspill.checkpoint.pickle_check import PickleRefusedError, check_pickle
from overspill.config import MIB
from overspill.errors import CheckpointCorruptError, CheckpointError, CheckpointUnsafeError

Program = Callable[[str], bytes]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    return tmp_path / "checkpoint" / "model.pt"


def within(instructions: bytes, protocol: int = 2) -> bytes:
    """A dict of a tensor and of what `instructions` make."""
    return bytes([0x80, protocol]) + b"}" + text("w") + TENSOR + b"s" + text("x") + instructions + b"s" + STOP


# ---------------------------------------------------------------- every instruction that calls

# Python's own unpickler runs these: what follows shows that they are no duds.
LIVE: dict[str, Program] = {
    "REDUCE": lambda target: b"cposix\nmkdir\n" + text(target) + b"\x85R",
    "GLOBAL of builtins": lambda target: b"cbuiltins\nexec\n" + text(f"__import__('os').mkdir({target!r})") + b"\x85R",
    "GLOBAL of Python 2": lambda target: (
        b"c__builtin__\neval\n" + text(f"__import__('os').mkdir({target!r})") + b"\x85R"
    ),
    "STACK_GLOBAL": lambda target: text("posix") + text("mkdir") + b"\x93" + text(target) + b"\x85R",
    "INST": lambda target: b"(" + text(target) + b"iposix\nmkdir\n",
    "OBJ": lambda target: b"(cposix\nmkdir\n" + text(target) + b"o",
    "NEWOBJ": lambda target: b"csubprocess\nPopen\n)\x81" + calling("posix mkdir", text(target)) + b"0",
    "NEWOBJ_EX": lambda target: b"cbuiltins\nobject\n)}\x92" + calling("posix mkdir", text(target)) + b"0",
    "BUILD": lambda target: (
        b"ccollections\nOrderedDict\n)R}" + text("a") + calling("posix mkdir", text(target)) + b"sb"
    ),
    "a key of the dict": lambda target: NO_HOOKS + calling("posix mkdir", text(target)) + b"Ns",
    "a call within a call": lambda target: (
        calling("builtins getattr", b"cos\npath\n", text("exists"))
        + text(target)
        + b"\x85R0"
        + calling("posix mkdir", text(target))
    ),
}


def as_plain_pickle(program: bytes) -> bytes:
    """Without the tensor, whose storage only torch can find."""
    return program.replace(text("w") + TENSOR + b"s", b"")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4:UserWarning")
@pytest.mark.parametrize("route", LIVE)
def test_no_instruction_runs_code(route: str, path: Path, canary: Path) -> None:
    pickle.loads(as_plain_pickle(within(LIVE[route](str(canary)))))
    canary.rmdir()  # it was there: the program works
    for protocol in (2, 4):
        path.write_bytes(archive_of(within(LIVE[route](str(canary)), protocol)))
        with pytest.raises(CheckpointUnsafeError, match=r"model\.pt .*If you trust whoever made it"):
            open_checkpoint(path)
        assert not canary.exists()


ODD_IDS = {
    "of another kind": b"(" + text("module") + b"N" + text("0") + text("cpu") + b"K\x04tQ",
    "that is text": b"P/etc/passwd\n",
    "that is a string": text("/etc/passwd") + b"Q",
    "whose class is a function": STORAGE.replace(b"ctorch\nFloatStorage\n", b"cposix\nmkdir\n"),
    "whose key leaves the archive": STORAGE.replace(text("0"), text("../../../etc/passwd")),
    "whose key is no name": STORAGE.replace(text("0"), b"K\x00"),
    "that is empty": b")Q",
    "that is short": b"(" + text("storage") + b"tQ",
    "of an extension": b"\x82\x01",
}


@pytest.mark.parametrize("kind", ODD_IDS)
def test_a_persistent_id_reads_nothing_but_storages(kind: str, path: Path) -> None:
    path.write_bytes(archive_of(within(ODD_IDS[kind])))
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "loader", ["torch.storage _load_from_bytes", "torch load", "torch.serialization load", "pickle loads"]
)
def test_a_pickle_within_a_pickle_is_not_loaded(loader: str, path: Path, canary: Path) -> None:
    inner = io.BytesIO()
    torch.save(MakesAFolder(canary), inner)
    content = calling("_codecs encode", text(inner.getvalue().decode("latin-1")), text("latin1"))
    path.write_bytes(archive_of(within(calling(loader, content))))
    with pytest.raises(CheckpointUnsafeError, match=r"model\.pt may run code"):
        open_checkpoint(path)
    assert not canary.exists()


def test_an_archive_within_an_archive_is_bytes_like_any(path: Path, canary: Path) -> None:
    inner = io.BytesIO()
    torch.save(MakesAFolder(canary), inner)
    path.write_bytes(
        archive_of(STATE_DICT, **{"data/1": inner.getvalue(), "nested/data.pkl": pickle.dumps(MakesAFolder(canary))})
    )
    assert set(open_checkpoint(path)) == {"w"}
    assert not canary.exists()


class Whatever(nn.Module):
    def __setstate__(self, state: dict[str, object]) -> None:
        raise AssertionError("code of a class ran")


@pytest.mark.parametrize("how", ["instance", "in a dict", "in state_dict", "beside state_dict"])
def test_an_object_of_a_class_is_refused(how: str, path: Path, canary: Path) -> None:
    for thing in (Whatever(), MakesAFolder(canary)):
        content = {
            "instance": thing,
            "in a dict": {"w": torch.ones(1), "x": thing},
            "in state_dict": {"state_dict": {"x": thing}},
            "beside state_dict": {"state_dict": {"w": torch.ones(1)}, "args": thing},
        }
        torch.save(content[how], path)
        with pytest.raises(CheckpointUnsafeError, match=r"model\.pt may run code"):
            open_checkpoint(path)
        assert not canary.exists()


@pytest.mark.parametrize("record", ["constants.pkl", "code/__torch__.py"])
def test_a_torchscript_archive_is_not_run(record: str, path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    with zipfile.ZipFile(path) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    if record != "constants.pkl":
        del records["constants.pkl"]  # what tells torch that it is one
    path.write_bytes(archive_of(records.pop("data.pkl"), **records))
    with pytest.raises(CheckpointUnsafeError, match=r"model\.pt"):
        open_checkpoint(path)


# ---------------------------------------------------------------- bombs

ENORMOUS = b"\x8a\x05" + (2**38).to_bytes(5, "little")
LIST = b"](" + b"N" * 20_000 + b"eq\x00"
BOMBS = {
    "tuples a million deep": (b")" + b"\x85" * 1_000_000, "nests more than 100 tuples"),
    "tuples deep with company": (b")" + b"N\x86K\x01K\x02\x87" * 300_000, "nests more than 100 tuples"),
    "tuples deep by memo": (b")" + b"q\x00h\x00\x86" * 200, "nests more than 100 tuples"),
    "a bytearray": (calling("builtins bytearray", ENORMOUS), "makes a bytearray"),
    "a bytearray of Python 2": (calling("__builtin__ bytearray", ENORMOUS), "makes a bytearray"),
    "a bytearray called by another": (
        calling("torch._tensor _rebuild_from_type_v2", b"cbuiltins\nbytearray\n", b"N", ENORMOUS + b"\x85", b"N"),
        "makes a bytearray",
    ),
    "many copies of one list": (b"(" + LIST + b"cbuiltins\nset\nh\x00\x85R" * 1000 + b"t", "copies far more"),
    "many copies of one text": (
        b"(" + text("x" * 20_000) + b"q\x00" + b"c_codecs\nencode\nh\x00\x85R" * 1000 + b"t",
        "copies far more",
    ),
    "copies of copies": (
        b"(" + LIST + b"cbuiltins\nset\nh\x00\x85Rq\x01" + b"cbuiltins\nset\nh\x01\x85R" * 1000 + b"t",
        "copies far more",
    ),
    "copies by a second function": (
        b"(" + LIST + b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nset\nNh\x00\x85NtR" * 1000 + b"t",
        "copies far more",
    ),
    "copies of a state": (b"(" + LIST + (NO_HOOKS + b"}" + text("a") + b"h\x00sb") * 1000 + b"t", "copies far more"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_that_would_crash_or_fill_the_memory_is_refused_before_it_is_loaded(bomb: str, path: Path) -> None:
    instructions, message = BOMBS[bomb]
    program = PROTOCOL + b"}" + instructions + b"Ns" + STOP
    with pytest.raises(PickleRefusedError, match=message):
        check_pickle(program)  # else the next line would take the process down
    path.write_bytes(archive_of(program))
    with pytest.raises(CheckpointUnsafeError, match=rf"model\.pt is unsafe to load: its pickle .*({message})"):
        open_checkpoint(path)


def test_what_is_no_pickle_is_corrupt(path: Path) -> None:
    for program in (
        b"",
        b".",
        b"\xff",
        b"\x85.",
        b"t.",
        b"h\x07.",
        b"Ra.",
        b")Na.",
        b"(((",
        b"X\xff\xff\xff\xff",
        PROTOCOL + b"}",
    ):
        path.write_bytes(archive_of(program))
        with pytest.raises(CheckpointError, match=r"model\.pt"):
            open_checkpoint(path)


def test_a_pickle_that_is_larger_than_any_state_dicts_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "MAX_HEADER", 1000)
    path.write_bytes(archive_of(b"N" * 1001))
    with pytest.raises(CheckpointCorruptError, match=r"model\.pt cannot be unpickled: its pickle has 1001 bytes"):
        open_checkpoint(path)


def test_honest_checkpoints_pass(path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2))
    marked = torch.ones(2)
    marked.note = "an attribute"  # type: ignore[attr-defined]
    beside = {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}, "groups": [{"betas": (0.9, (0.99, (0.999,)))}]},
        "rng": torch.get_rng_state(),
        "hyper": {
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "names": {"a", "b"},
        },
        "note": b"plain bytes" * 100,
        "steps": collections.Counter("mississippi"),
        "marked": marked,
        "big": 2**70,
    }
    torch.save({"state_dict": model.state_dict(), **beside}, path)
    assert set(open_checkpoint(path)) == set(model.state_dict())
    torch.save({f"layers.{n}.weight": nn.Parameter(torch.ones(1)) for n in range(300)}, path)
    assert len(open_checkpoint(path)) == 300


# ---------------------------------------------------------------- traps


def test_attributes_that_a_pickle_gives_its_objects_change_nothing(path: Path) -> None:
    def shadowing(*names: str) -> bytes:
        return b"}" + b"".join(text(name) + b"K\x01s" for name in names)

    tensor = calling(
        "torch._utils _rebuild_parameter_with_state",
        TENSOR,
        b"\x89",
        NO_HOOKS,
        shadowing("is_contiguous", "storage_offset", "untyped_storage", "detach", "is_conj", "stride"),
    )
    for state_dict in (b"", text("state_dict") + NO_HOOKS):
        program = (
            PROTOCOL + NO_HOOKS + state_dict + text("w") + tensor + b"s" + shadowing("items", "get", "values") + b"b"
        )
        path.write_bytes(archive_of(program + (b"s" if state_dict else b"") + STOP))
        stored = open_checkpoint(path)["w"]
        assert (stored.spec.shape, stored.nbytes) == ((4,), 16)
        assert path.read_bytes()[stored.offset :][:16] == bytes(16)


SIZES = {
    "past its storage": (b"K\x05\x85", b"K\x01\x85", b"K\x00"),
    "from behind its storage": (b"K\x04\x85", b"K\x01\x85", b"K\x01"),
    "of more than memory": (ENORMOUS + ENORMOUS + b"\x86", ENORMOUS + b"K\x01\x86", b"K\x00"),
    "of a negative size": (b"J\xff\xff\xff\xff\x85", b"K\x01\x85", b"K\x00"),
    "from before its storage": (b"K\x01\x85", b"K\x01\x85", b"J\xff\xff\xff\xff"),
    "of strides without end": (b"K\x02\x85", ENORMOUS + b"\x85", b"K\x00"),
}


@pytest.mark.parametrize("lie", SIZES)
def test_a_tensor_that_lies_about_its_place_is_refused(lie: str, path: Path) -> None:
    size, stride, offset = SIZES[lie]
    tensor = calling("torch._utils _rebuild_tensor_v2", STORAGE, offset, size, stride, b"\x89", NO_HOOKS)
    path.write_bytes(archive_of(PROTOCOL + b"}" + text("w") + tensor + b"s" + STOP))
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        open_checkpoint(path)


# ---------------------------------------------------------------- archives


BOMBED = [(record, zipfile.ZIP_DEFLATED) for record in ("data.pkl", "data/0", "byteorder", "version", "padding")]


@pytest.mark.parametrize(("record", "method"), [*BOMBED, ("data.pkl", zipfile.ZIP_LZMA)])
def test_a_zip_bomb_is_refused_unopened(record: str, method: int, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": STATE_DICT, "byteorder": b"little", "data/0": bytes(16)}.items():
            if name != record:
                archive.writestr(f"archive/{name}", content)
        archive.writestr(zipfile.ZipInfo(f"archive/{record}"), bytes(16 * MIB), method)
    assert path.stat().st_size < MIB
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"model\.pt holds the record 'archive/{record}' compressed"):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_a_byte_order_as_large_as_the_file_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(archive_of(STATE_DICT, byteorder=b"little" * 1000))
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match=r"model\.pt was written on a big-endian machine"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name",
    ["../canary", "../../canary", "/tmp/canary", "data/../../../canary", "C:\\canary", "data/0", "nul\0l", "DATA.PKL"],
)
def test_a_record_of_any_name_is_written_nowhere(name: str, path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for record in ("data.pkl", "byteorder", "data/0"):
            archive.writestr(
                f"archive/{record}", {"data.pkl": STATE_DICT, "byteorder": b"little"}.get(record, bytes(16))
            )
        with pytest.warns(UserWarning, match="Duplicate name") if name == "data/0" else nullcontext():
            archive.writestr(name if name.startswith(("/", ".", "C")) else f"archive/{name}", bytes(16))
    before = sorted(tmp_path.rglob("*"))
    try:
        stored = open_checkpoint(path)["w"]
    except CheckpointError as error:
        named = str(path) in str(error)
    else:
        named = 0 <= stored.offset <= path.stat().st_size - stored.nbytes
    assert named
    assert sorted(tmp_path.rglob("*")) == before


END = struct.Struct("<4s4H2LH")
LIES = {"entries": (3, 4), "size": (5,), "offset": (6,), "comment": (7,), "disk": (1, 2)}


@pytest.mark.parametrize("field", LIES)
@pytest.mark.parametrize("value", [0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_archives_directory_that_lies_is_refused_or_right(field: str, value: int, path: Path) -> None:
    content = archive_of(STATE_DICT)
    parts = list(END.unpack(content[-END.size :]))
    for position in LIES[field]:
        parts[position] = value & (0xFFFFFFFF if position in (5, 6) else 0xFFFF)
    path.write_bytes(content[: -END.size] + END.pack(*parts))
    tracemalloc.start()
    try:
        stored = open_checkpoint(path)["w"]
    except CheckpointError as error:
        right = str(path) in str(error)
    else:
        right = path.read_bytes()[stored.offset :][:16] == bytes(16)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert right
    assert peak < 4 * MIB


def test_the_user_is_named_the_file_also_from_an_index(tmp_path: Path, canary: Path) -> None:
    torch.save({"w": MakesAFolder(canary)}, tmp_path / "part.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "part.bin"}}')
    with pytest.raises(CheckpointUnsafeError, match=r"part\.bin may run code when it is loaded: it calls posix\.mkdir"):
        open_checkpoint(tmp_path)
    assert not canary.exists()
