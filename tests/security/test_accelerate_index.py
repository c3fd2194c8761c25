"""An offload folder of Accelerate's whose index lies: adopting the model refuses it, and nothing in it runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import overspill
from fuzz_inputs import MakesAFolder
from overspill.errors import CheckpointError, CheckpointUnsafeError, OverspillError

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "offload"


def dispatched(folder: Path, lie: Callable[[dict[str, Any]], None]) -> nn.Module:
    """A model that Accelerate keeps in `folder`, whose index has been changed by `lie`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    accelerate.disk_offload(model, str(folder), execution_device="cpu")
    index = json.loads((folder / "index.json").read_text())
    lie(index)
    (folder / "index.json").write_text(json.dumps(index))
    with accelerate.init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    # As Accelerate's own functions do with a folder that an earlier run, or somebody else, has left.
    return accelerate.dispatch_model(
        model, {"": "disk"}, main_device="cpu", offload_dir=str(folder), offload_index=index, force_hooks=True
    )


def test_an_honest_folder_is_adopted(folder: Path) -> None:
    model = dispatched(folder, lambda index: None)
    expected = torch.frombuffer(bytearray((folder / "0.weight.dat").read_bytes()), dtype=torch.float32)
    overspill.adopt(model)
    assert torch.equal(model[0].weight.detach().flatten(), expected)


DTYPES: list[object] = [
    "",
    "os",
    "nn",
    "load",
    "float33",
    "float32.__class__",
    "__builtins__",
    "FloatTensor",
    None,
    3,
    ["float32"],
    {},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_that_is_none_is_refused(dtype: object, folder: Path) -> None:
    model = dispatched(folder, lambda index: index["0.weight"].update(dtype=dtype))
    with pytest.raises(CheckpointError, match=r"0\.weight the dtype .* which torch does not have"):
        overspill.adopt(model)


@pytest.mark.parametrize("dtype", ["float64", "int8", "bool", "complex128"])
def test_a_dtype_of_another_size_is_refused(dtype: str, folder: Path) -> None:
    model = dispatched(folder, lambda index: index["0.weight"].update(dtype=dtype))
    with pytest.raises(CheckpointError, match=r"0\.weight\.dat has 64 bytes"):
        overspill.adopt(model)


@pytest.mark.parametrize("shape", [[], [16], [2, 8], [4, 4, 1], [4, 2**62], [0], [-4, -4], [2**40, 2**40]], ids=str)
def test_a_shape_that_lies_is_refused(shape: list[int], folder: Path) -> None:
    model = dispatched(folder, lambda index: index["0.weight"].update(shape=shape))
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        overspill.adopt(model)


MALFORMED: list[object] = [
    None,
    "float32",
    7,
    ["dtype", "shape"],
    {},
    {"dtype": "float32"},
    {"dtype": "float32", "shape": None},
    {"dtype": "float32", "shape": 16},
    {"dtype": "float32", "shape": "44"},
    {"dtype": "float32", "shape": ["4", "4"]},
    {"dtype": "float32", "shape": [4.0, 4]},
    {"dtype": "float32", "shape": [[4, 4]]},
    {"dtype": "float32", "shape": {"4": 4}},
    {"dtype": "float32", "shape": [4, 4], "safetensors_file": 3},
    {"dtype": "float32", "shape": [4, 4], "safetensors_file": ["x"]},
    {"dtype": "float32", "shape": [4, 4], "safetensors_file": "x.safetensors", "weight_name": ["0.weight"]},
]


@pytest.mark.parametrize("entry", MALFORMED, ids=str)
def test_an_entry_that_is_malformed_is_refused_by_the_name_of_the_index(entry: object, folder: Path) -> None:
    save_file({"0.weight": torch.ones(4, 4)}, folder.parent / "x.safetensors")
    if isinstance(entry, dict) and entry.get("safetensors_file") == "x.safetensors":
        entry = {**entry, "safetensors_file": str(folder.parent / "x.safetensors")}
    model = dispatched(folder, lambda index: index.update({"0.weight": entry}))
    with pytest.raises(CheckpointError, match=rf"{folder / 'index.json'} (says|gives) .*0\.weight"):
        overspill.adopt(model)
    assert all(module._hf_hook is not None for module in (model[0], model[1]))  # as it was, with its hooks


@pytest.mark.parametrize("index", [["0.weight"], "0.weight", 3], ids=str)
def test_an_index_that_is_no_table_is_refused(index: object, folder: Path) -> None:
    model = dispatched(folder, lambda index: None)
    model[0]._hf_hook.weights_map.dataset.index = index
    with pytest.raises(CheckpointError, match=rf"{folder / 'index.json'} is not a table"):
        overspill.adopt(model)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "a link to more", "cut short", "gone"])
def test_a_file_that_is_not_what_the_index_says_is_refused_and_not_waited_for(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    model = dispatched(folder, lambda index: None)
    path = folder / "0.weight.dat"
    path.unlink()
    (tmp_path / "secret").write_bytes(bytes(65))
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a link to more":
        path.symlink_to(tmp_path / "secret")
    elif kind == "cut short":
        path.write_bytes(bytes(63))
    with pytest.raises(CheckpointError, match=r"0\.weight\.dat (has \d+ bytes|is gone)"):
        overspill.adopt(model)


def test_a_file_that_is_swapped_after_it_was_adopted_is_noticed(folder: Path, tmp_path: Path) -> None:
    model = dispatched(folder, lambda index: None)
    overspill.adopt(model)
    (tmp_path / "secret").write_bytes(bytes(64))
    (folder / "0.weight.dat").unlink()
    (folder / "0.weight.dat").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"0\.weight\.dat changed after it was opened"):
        model(torch.ones(1, 4))


FILES = ["/etc/passwd", "/dev/zero", "../secret.txt", "no/such.safetensors", "", "nul\0l.safetensors"]


@pytest.mark.parametrize("file", FILES)
def test_a_safetensors_file_that_is_none_is_refused(file: str, folder: Path) -> None:
    model = dispatched(folder, lambda index: index["0.weight"].update(safetensors_file=file, weight_name="0.weight"))
    with pytest.raises(OverspillError):
        overspill.adopt(model)


def test_code_in_a_file_that_the_index_names_does_not_run(folder: Path, tmp_path: Path) -> None:
    torch.save({"0.weight": MakesAFolder(tmp_path / "canary")}, tmp_path / "model.bin")
    model = dispatched(folder, lambda index: index["0.weight"].update(safetensors_file=str(tmp_path / "model.bin")))
    with pytest.raises(CheckpointUnsafeError, match=r"model\.bin may run code"):
        overspill.adopt(model)
    assert not (tmp_path / "canary").exists()


def test_a_tensor_of_another_shape_in_a_safetensors_file_is_refused(folder: Path, tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, 5)}, tmp_path / "other.safetensors")
    entry = {"safetensors_file": str(tmp_path / "other.safetensors"), "weight_name": "x", "dtype": "float32"}
    model = dispatched(folder, lambda index: index["0.weight"].update(entry))
    with pytest.raises(CheckpointError, match=r"0\.weight is \[4, 4\] in the model and \[4, 5\]"):
        overspill.adopt(model)
