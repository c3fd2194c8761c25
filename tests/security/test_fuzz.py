"""Thousands of hostile checkpoints: each is refused by name, or read as an independent reader reads it."""

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz_inputs import IndexMaker, SafetensorsMaker, file_of
from fuzzing import STATED_REASONS, accepted_by_safetensors, checkpoint_to_index, examine_index, examine_safetensors
from overspill.checkpoint import open_checkpoint
from overspill.config import MIB
from overspill.errors import CheckpointCorruptError

FUZZING = Path(__file__).parents[1] / "fuzzing.py"
STUCK = 60.0
"""Seconds that one input may take on a machine however busy; they take less than a thousandth."""


def fuzz(folder: Path, kinds: list[str], count: int, *options: str) -> dict[str, dict[str, int]]:
    """Examine `count` inputs of each kind in a process with little memory, and watch that it gets on."""
    command = [sys.executable, str(FUZZING), *kinds, f"--count={count}", f"--folder={folder}", *options]
    path = os.pathsep.join([str(FUZZING.parent), str(FUZZING.parents[1] / "src"), *filter(None, sys.path)])
    with (folder / "output").open("w+") as output, (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=output, stderr=errors)
        try:
            _wait(process, folder)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        assert process.returncode == 0, f"{errors.read()[-3000:]}\nThe input was {_current(folder)!r}"
        output.seek(0)
        outcomes: dict[str, dict[str, int]] = json.loads(output.read() or "{}")
        return outcomes


def _wait(process: subprocess.Popen[bytes], folder: Path) -> None:
    seen, since = _current(folder), time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        if (now := _current(folder)) != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() - since < STUCK, f"it hangs with {now!r}"


def _current(folder: Path) -> bytes:
    for name in ("current", "model.safetensors", "model.pt"):  # atheris knows no `current`
        try:
            return (folder / name).read_bytes()
        except FileNotFoundError:
            continue
    return b""


# ---------------------------------------------------------------- in a process that is watched


KINDS = ["safetensors", "index", "pickle"]


def test_inputs_are_refused_by_name_or_read_right(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, KINDS, 1000)
    assert [sum(counts.values()) for counts in outcomes.values()] == [1000] * 3
    for counts in outcomes.values():
        assert min(counts["accepted"], counts["refused"]) >= 30, outcomes  # neither all noise nor all right


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_inputs_are_refused_by_name_or_read_right(kind: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)  # others each time; one that fails is shown, whole
    outcomes = fuzz(tmp_path, [kind], 100_000, f"--seed={seed}")
    assert sum(outcomes[kind].values()) == 100_000


@pytest.mark.soak
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed: pip install '.[fuzz]'"
)
@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
def test_very_many_inputs_that_coverage_leads_to_are_too(kind: str, tmp_path: Path) -> None:
    fuzz(tmp_path, [kind], 100_000, "--atheris")


# ---------------------------------------------------------------- small enough to be read when they fail

chances = st.randoms(use_true_random=False)


@settings(max_examples=250)
@given(chance=chances)
def test_a_file_with_a_lie_is_refused_or_read_as_safe_open_reads_it(chance: random.Random) -> None:
    content = SafetensorsMaker(chance).make()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        if examine_safetensors(content, path) != "accepted":
            return
        index = open_checkpoint(path)
        with safetensors.safe_open(path, "pt") as file:
            assert set(file.keys()) == set(index)
            for name, stored in index.items():
                tensor = file.get_tensor(name)
                assert (tuple(tensor.shape), tensor.dtype) == (stored.spec.shape, stored.spec.dtype)


@settings(max_examples=250)
@given(chance=chances)
def test_an_index_with_a_lie_leads_nowhere_but_to_its_own_folder(chance: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        examine_index(IndexMaker(chance, parent).make(), checkpoint_to_index(parent))


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
STRICTER = {
    "a key occurs twice: readers disagree on which counts": file_of(b'{"w":%b,"w":%b}' % (ENTRY, ENTRY), bytes(4)),
    "a field that the format does not have may change what the others mean": file_of(
        b'{"w":{"scale":2,%b}' % ENTRY[1:], bytes(4)
    ),
    "a tensor that is described by a list relies on the order of fields": file_of(b'{"w":["F32",[1],[0,4]]}', bytes(4)),
    "F4 and F6 count parts of bytes, and a dtype may only be a name": file_of(
        b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', bytes(1)
    ),
    "an empty tensor may hide sizes that torch cannot hold": file_of(
        b'{"w":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'
    ),
}


@pytest.mark.parametrize("reason", STATED_REASONS)
def test_we_are_stricter_than_the_safetensors_package_for_stated_reasons_alone(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert accepted_by_safetensors(STRICTER[reason]) is not None
    assert examine_safetensors(STRICTER[reason], path) == "refused for a stated reason"
    with pytest.raises(CheckpointCorruptError, match=STATED_REASONS[reason]):
        open_checkpoint(path)


# ---------------------------------------------------------------- memory

LYING_LENGTHS = [2**20, 99_999_999, 100_000_000, 100_000_001, 2**32, 2**63, 2**64 - 1]


@pytest.mark.parametrize("length", LYING_LENGTHS)
def test_a_header_that_claims_to_be_large_takes_no_memory(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"w":' + ENTRY + b"}" + bytes(4))
    assert _peak_of_a_refusal(path) < MIB


@pytest.mark.parametrize(
    "header",
    [
        b'{"w":{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}}',
        b'{"w":{"dtype":"U8","shape":[%b],"data_offsets":[0,1]}}' % b",".join([b"4611686018427387904"] * 20_000),
        b'{"w":' + b"[" * 400_000,
        b'{"w":' + b"9" * 400_000 + b"}",
        b'{"w":"' + b"\\u0041" * 60_000 + b'"}',
        b'{"w":[' + b"[]," * 100_000 + b"[]]}",  # what takes most for its length
        b'{"w":[' + b"{}," * 100_000 + b"{}]}",
    ],
    ids=["bytes", "sizes", "depth", "digits", "text", "lists", "objects"],
)
def test_a_header_takes_memory_in_proportion_to_its_length(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header))
    assert _peak_of_a_refusal(path) < MIB + 64 * len(header)


def test_an_index_that_grows_while_it_is_read_is_read_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_to_index(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    fstat = os.fstat

    def growing_fstat(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        if os.path.samestat(status, index.stat()):
            with index.open("ab") as file:
                file.truncate(64 * MIB)
        return status

    monkeypatch.setattr(os, "fstat", growing_fstat)
    tracemalloc.start()
    try:
        assert set(open_checkpoint(folder)) == {"a"}
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def _peak_of_a_refusal(path: Path) -> int:
    with pytest.raises(CheckpointCorruptError):
        open_checkpoint(path)  # what is cached on first use is not this file's doing
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptError):
            open_checkpoint(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
