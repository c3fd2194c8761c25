"""nanomodel's names, on overspill's verbs: what they promise, and what went wrong in the original."""

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import overspill
from overspill.compat import nanomodel
from overspill.compat.nanomodel import (
    get_module_fullname,
    is_meta_module,
    offload_to_disk,
    set_submodule,
    undo_offload_to_disk,
)
from overspill.errors import BudgetError, OffloadFolderError, PlanError, StateError
from overspill.managed import managed
from support import Block, Net, aligned

IDS = torch.arange(24).view(2, 12)
BLOCK_BYTES = (64 * 32 + 64 + 64 * 32) * 4  # of a Block, what lies in leaves of 4 KB and more: up and down


@pytest.fixture
def model() -> Net:
    return aligned(Net())  # type: ignore[return-value]


@pytest.fixture
def twin(model: Net) -> Net:
    """The same model, which nobody offloads."""
    return copy.deepcopy(model)


# ---------------------------------------------------------------- what all tests look at


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def on_disk(module: nn.Module) -> set[str]:
    """Names of the tensors without memory."""
    return {name for name, tensor in named_tensors(module) if hasattr(tensor, "_overspill_values")}


def memory_of(module: nn.Module) -> dict[str, StorageWeakRef]:
    return {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in named_tensors(module)}


def freed(memory: dict[str, StorageWeakRef]) -> set[str]:
    return {name for name, reference in memory.items() if reference.expired()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().cpu().contiguous().reshape(-1).view(torch.uint8)


def ties(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(module):
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def assert_same_state(module: nn.Module, twin: nn.Module) -> None:
    ours, theirs = dict(named_tensors(module)), dict(named_tensors(twin))
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (value.shape, value.dtype), name
        assert torch.equal(bits(ours[name]), bits(value)), name
    assert ties(module) == ties(twin)


def assert_ordinary(module: nn.Module, twin: nn.Module) -> None:
    """Nothing tells it from its twin that was never offloaded."""
    assert_same_state(module, twin)
    assert on_disk(module) == set()
    for part, other in zip(module.modules(), twin.modules(), strict=True):
        assert list(vars(part)) == list(vars(other))
        assert part._compiled_call_impl is None
    for (name, tensor), (_, other_tensor) in zip(named_tensors(module), named_tensors(twin), strict=True):
        assert type(tensor) is type(other_tensor), name
        assert not tensor.is_inference(), name


def train_step(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    module(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_trains(module: nn.Module, twin: nn.Module, x: torch.Tensor = IDS) -> None:
    """Backward gives the same gradients, and an optimizer's step the same weights."""
    ours, theirs = train_step(module, x), train_step(twin, x)
    assert list(ours) == list(theirs) == [name for name, p in twin.named_parameters() if p.requires_grad]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for net in (module, twin):
        torch.optim.SGD(net.parameters(), lr=0.5).step()
    assert_same_state(module, twin)


def same_output(module: nn.Module, twin: nn.Module, x: torch.Tensor = IDS) -> bool:
    with torch.no_grad():
        return torch.equal(module(x), twin(x))


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def stored(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What lies in each folder, as any reader of safetensors sees it."""
    return {path.parent.name: load_file(path) for path in folder.rglob("*.safetensors")}


def nbytes(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


# ---------------------------------------------------------------- the names


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (offload_to_disk, "(module, model=None, disk_path='.')"),
        (
            undo_offload_to_disk,
            "(module, device=None, include_buffers=True, delete_offload_folders=True, dtype=None)",
        ),
        (get_module_fullname, "(model, module)"),
        (set_submodule, "(root, path, new_mod)"),
        (is_meta_module, "(m)"),
    ],
)
def test_names_order_and_defaults_are_those_that_callers_know(function: Callable[..., Any], parameters: str) -> None:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == parameters
    assert function.__name__ in nanomodel.__all__


# ---------------------------------------------------------------- offload_to_disk


def test_a_module_goes_to_a_folder_with_its_dotted_name(model: Net, twin: Net, tmp_path: Path) -> None:
    memory, objects = memory_of(model), dict(named_tensors(model))
    gone = {"blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.weight"}
    offload_to_disk(model.blocks[1], model, tmp_path / "off")
    assert on_disk(model) == gone
    assert freed(memory) == gone
    assert all(tensor is objects[name] for name, tensor in named_tensors(model)), "an optimizer holds these"
    files = stored(tmp_path / "off")
    assert list(files) == ["blocks.1"]
    assert set(files["blocks.1"]) == gone
    assert nbytes(files["blocks.1"]) == BLOCK_BYTES
    assert (tmp_path / "off" / "blocks.1" / "tensors.safetensors").stat().st_size >= BLOCK_BYTES
    state = twin.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in files["blocks.1"].items())
    assert same_output(model, twin)
    assert_same_state(model, twin)


@pytest.mark.parametrize("paths", [["blocks.0", "embed"], ("blocks.0", "embed"), ["embed", "blocks.0", "blocks.0.up"]])
def test_paths_go_to_a_folder_each(paths: Any, model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(module=paths, model=model, disk_path=str(tmp_path / "off"))
    assert set(stored(tmp_path / "off")) == {"blocks.0", "embed"}
    assert same_output(model, twin)
    assert undo_offload_to_disk(model) is model
    assert_ordinary(model, twin)
    assert list(tmp_path.iterdir()) == []


def test_a_leaf_deep_in_the_model_goes_alone(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(model.blocks[2].down, model, tmp_path)
    assert on_disk(model) == {"blocks.2.down.weight"}
    assert list(stored(tmp_path)) == ["blocks.2.down"]
    assert nbytes(stored(tmp_path)["blocks.2.down"]) == 64 * 32 * 4
    assert same_output(model, twin)


def test_a_container_without_tensors_of_its_own_means_all_in_it(model: Net, twin: Net, tmp_path: Path) -> None:
    assert list(model.blocks.parameters(recurse=False)) == []
    offload_to_disk(model.blocks, model, tmp_path)
    files = stored(tmp_path)
    assert set(files) == {f"blocks.{i}" for i in range(4)}
    assert sum(map(nbytes, files.values())) == 4 * BLOCK_BYTES
    assert same_output(model, twin)
    undo_offload_to_disk(model.blocks)
    assert_ordinary(model, twin)
    assert_trains(model, twin)


@pytest.mark.parametrize("with_model", [False, True])
def test_the_model_itself_in_the_default_folder_leaves_what_is_there_alone(
    with_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "model.safetensors").write_bytes(b"also mine")
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = aligned(nn.Linear(64, 64))
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    offload_to_disk(model, model if with_model else None)
    assert on_disk(model) == {"weight", "bias"}
    now = tree(tmp_path)
    assert {path: now[path] for path in before} == before
    assert sum(len(now[path] or b"") for path in now if path not in before) > 64 * 64 * 4
    assert same_output(model, twin, x)
    undo_offload_to_disk(model)
    assert tree(tmp_path) == before
    assert_ordinary(model, twin)
    assert_trains(model, twin, x)


def test_a_whole_model_of_many_modules(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(model, disk_path=tmp_path)
    assert sum(map(nbytes, stored(tmp_path).values())) == 4 * BLOCK_BYTES + 64 * 32 * 4
    assert same_output(model, twin)
    undo_offload_to_disk(model)
    assert_ordinary(model, twin)
    assert_trains(model, twin)


def test_a_module_without_its_model_is_a_model_of_its_own(tmp_path: Path) -> None:
    block = aligned(Block())
    twin, x = copy.deepcopy(block), torch.randn(3, 32)
    offload_to_disk(block, disk_path=tmp_path)
    assert sum(map(nbytes, stored(tmp_path).values())) == BLOCK_BYTES
    assert same_output(block, twin, x)
    undo_offload_to_disk(block)
    assert_ordinary(block, twin)


def test_a_wrapper_goes_as_what_it_wraps(model: Net, twin: Net, tmp_path: Path) -> None:
    class Named(nn.Module):
        """As quantizers have it: around a module, but no parent of it."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            object.__setattr__(self, "module", module)

    offload_to_disk(Named(model.blocks[0].up), model, tmp_path)
    assert on_disk(model) == {"blocks.0.up.weight", "blocks.0.up.bias"}
    assert same_output(model, twin)


def test_leaves_under_four_kilobytes_stay(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 31), nn.Linear(31, 32), nn.Linear(32, 32), nn.LayerNorm(32))
    assert [sum(p.nbytes for p in leaf.parameters()) for leaf in model] == [4092, 4096, 4224, 256]
    offload_to_disk(model, disk_path=tmp_path)
    assert on_disk(model) == {"1.weight", "1.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("path", ["norm", "blocks.0.norm"])
def test_where_nothing_is_large_enough_nothing_happens_and_the_log_says_so(
    path: str, model: Net, twin: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="overspill"):
        offload_to_disk([path], model, tmp_path)
    assert f"nothing to offload: no leaf below {path!r}" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(model, twin)


def test_what_is_on_disk_already_is_named(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(["blocks.0"], model, tmp_path)
    with pytest.raises(StateError, match=r"blocks\.0\.up\.weight"):
        offload_to_disk(model.blocks[0], model, tmp_path)
    assert same_output(model, twin)


@pytest.mark.parametrize(
    ("path", "nearest"), [("block.1", "blocks.1"), ("blocks.1.upp", "blocks.1.up"), ("emb", "embed")]
)
def test_an_unknown_path_is_named_with_the_nearest(
    path: str, nearest: str, model: Net, twin: Net, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=rf"{path}'.*{nearest}"):
        offload_to_disk(["blocks.0", path], model, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(model, twin)


def test_paths_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"blocks\.0.*model="):
        offload_to_disk(["blocks.0"], disk_path=tmp_path)


def test_a_module_of_another_model_is_refused(model: Net, twin: Net, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Block.*Net"):
        offload_to_disk(twin.blocks[0], model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_two_models_mix_in_one_folder(model: Net, twin: Net, tmp_path: Path) -> None:
    other = aligned(Net(width=48))
    other_twin = copy.deepcopy(other)
    offload_to_disk(model.blocks, model, tmp_path)
    before = tree(tmp_path)
    with pytest.raises(OffloadFolderError, match="another model"):
        offload_to_disk(["blocks"], other, tmp_path)
    assert tree(tmp_path) == before
    assert_ordinary(other, other_twin)
    assert same_output(model, twin)


# ---------------------------------------------------------------- undo_offload_to_disk


class Kinds(nn.Module):
    """Parameters and buffers of several dtypes in one leaf, one of them frozen, one buffer not stored."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(64, 64))
        self.b = nn.Parameter(torch.randn(64, 64, dtype=torch.float64).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("codes", torch.randint(-128, 127, (64, 64), dtype=torch.int8))
        self.register_buffer("scale", torch.randn(64, dtype=torch.float16))
        self.register_buffer("steps", torch.arange(64.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x @ self.a + x @ self.b.to(x.dtype) + self.get_buffer("scale").to(x.dtype)
        return y + self.steps.to(x.dtype)


def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path) -> None:
    model = aligned(Kinds())
    twin, objects, x = copy.deepcopy(model), dict(named_tensors(model)), torch.randn(2, 64)
    offload_to_disk(model, disk_path=tmp_path)
    assert on_disk(model) == {"a", "b", "codes", "scale"}
    assert undo_offload_to_disk(model) is model
    assert all(tensor is objects[name] for name, tensor in named_tensors(model))
    assert [p.requires_grad for p in model.parameters()] == [True, False]
    assert_ordinary(model, twin)
    assert_trains(model, twin, x)


def test_what_comes_back_within_inference_mode_can_be_trained(model: Net, twin: Net, tmp_path: Path) -> None:
    with torch.inference_mode():
        offload_to_disk(["blocks.1"], model, tmp_path)
        model(IDS)
        undo_offload_to_disk(model.blocks[1])
    assert_ordinary(model, twin)
    assert_trains(model, twin)


def test_edits_made_meanwhile_are_in_what_comes_back(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(model.blocks, model, tmp_path)
    for net in (model, twin):
        net.blocks[1].up.weight.data.mul_(2)
        nn.init.constant_(net.blocks[2].down.weight, 0.25)
    assert same_output(model, twin)
    undo_offload_to_disk(model)
    assert_ordinary(model, twin)


def batch_norm() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 8))
    nn.init.uniform_(model[1].running_mean)
    nn.init.uniform_(model[1].running_var)
    return aligned(model)  # type: ignore[return-value]


def test_buffers_of_a_batch_norm_go_and_come_back(tmp_path: Path) -> None:
    model = batch_norm().eval()
    twin, x = copy.deepcopy(model), torch.randn(5, 64)
    offload_to_disk(model[1], model, tmp_path)
    assert on_disk(model) == {f"1.{name}" for name, _ in named_tensors(twin[1])}
    assert set(stored(tmp_path)["1"]) >= {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert same_output(model, twin, x)
    undo_offload_to_disk(model)
    assert_ordinary(model, twin)
    assert same_output(model, twin, x)


def test_statistics_of_a_batch_norm_are_kept_up_on_disk(tmp_path: Path) -> None:
    model = batch_norm()
    twin = copy.deepcopy(model)
    offload_to_disk(model[1], model, tmp_path)
    for _ in range(3):
        assert same_output(model, twin, torch.randn(5, 64) + 3)
    undo_offload_to_disk(model)
    assert int(model[1].num_batches_tracked) == 3
    assert_ordinary(model, twin)
    assert_trains(model, twin, torch.randn(5, 64))


def test_a_tie_inside_a_module_is_stored_once_and_stays(tmp_path: Path) -> None:
    model = aligned(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    model[2].weight = model[0].weight
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    offload_to_disk(model, disk_path=tmp_path)
    assert sum(map(nbytes, stored(tmp_path).values())) == 64 * 64 * 4 + 2 * 64 * 4
    assert model[2].weight is model[0].weight
    assert same_output(model, twin, x)
    undo_offload_to_disk(model)
    assert model[2].weight is model[0].weight
    assert_ordinary(model, twin)
    assert_trains(model, twin, x)


@pytest.mark.parametrize("gone", [["embed"], ["head"], ["embed", "head"], ["blocks.0", "head"]])
@pytest.mark.parametrize("undone", ["embed", "head"])
def test_a_tie_across_modules_goes_and_comes_back_as_one(
    gone: list[str], undone: str, model: Net, twin: Net, tmp_path: Path
) -> None:
    offload_to_disk(gone, model, tmp_path)
    assert {"embed.weight", "head.weight"} <= on_disk(model)
    assert sum(map(nbytes, stored(tmp_path).values())) == 64 * 32 * 4 + ("blocks.0" in gone) * BLOCK_BYTES
    assert model.head.weight is model.embed.weight
    assert same_output(model, twin)
    undo_offload_to_disk(model.get_submodule(undone))
    assert not is_meta_module(model.embed)
    assert not is_meta_module(model.head)
    assert model.head.weight is model.embed.weight
    assert same_output(model, twin)
    if is_meta_module(model):
        undo_offload_to_disk(model)
    assert_ordinary(model, twin)
    assert_trains(model, twin)


def test_a_part_comes_back_and_the_rest_stays_away(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(model.blocks, model, tmp_path)
    undo_offload_to_disk(model.blocks[1])
    undo_offload_to_disk(model.blocks[2].up)
    assert on_disk(model) == {
        *(f"blocks.{i}.{name}" for i in (0, 3) for name in ("up.weight", "up.bias", "down.weight")),
        "blocks.2.down.weight",
    }
    assert same_output(model, twin)
    assert set(stored(tmp_path)) == {"blocks.0", "blocks.2", "blocks.3"}, "the others' files are still needed"
    undo_offload_to_disk(model)
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(model, twin)


def test_folders_stay_if_they_are_to_be_kept(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(["blocks.1"], model, tmp_path)
    before = {path: data for path, data in tree(tmp_path).items() if "blocks.1" in path}
    undo_offload_to_disk(model, delete_offload_folders=False)
    assert {path: data for path, data in tree(tmp_path).items() if "blocks.1" in path} == before
    assert_ordinary(model, twin)


def test_what_others_put_into_the_folders_survives(model: Net, twin: Net, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    offload_to_disk(["blocks.1"], model, tmp_path)
    (tmp_path / "blocks.1" / "notes.txt").write_text("beside the weights")
    undo_offload_to_disk(model, delete_offload_folders=True)
    assert tree(tmp_path) == {"mine.txt": b"mine", "blocks.1": None, "blocks.1/notes.txt": b"beside the weights"}
    assert_ordinary(model, twin)


def test_another_folder_in_the_way_is_left_alone(model: Net, twin: Net, tmp_path: Path) -> None:
    (tmp_path / "blocks.1").mkdir()
    (tmp_path / "blocks.1" / "index.json").write_text("{}")
    before = tree(tmp_path)
    with pytest.raises(OffloadFolderError, match=r"blocks\.1"):
        offload_to_disk(["blocks.1"], model, tmp_path)
    assert tree(tmp_path) == before
    assert_ordinary(model, twin)


def test_dtype_casts_what_is_floating_point(tmp_path: Path) -> None:
    model = aligned(Kinds())
    twin = copy.deepcopy(model)
    offload_to_disk(model, disk_path=tmp_path)
    undo_offload_to_disk(model, dtype=torch.float64)
    assert_ordinary(model, twin.to(torch.float64))
    assert model.get_buffer("codes").dtype == torch.int8
    assert_trains(model, twin, torch.randn(2, 64, dtype=torch.float64))


def test_dtype_is_honoured_for_a_leaf_of_a_larger_module(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(["blocks.0"], model, tmp_path)
    undo_offload_to_disk(model.blocks[0].up, dtype=torch.bfloat16)
    twin.blocks[0].up.to(torch.bfloat16)
    assert_same_state(model, twin)


def test_a_dtype_that_weights_cannot_have_is_refused(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(["blocks.0"], model, tmp_path)
    with pytest.raises(PlanError, match="int8"):
        undo_offload_to_disk(model, dtype=torch.int8)
    assert is_meta_module(model)
    assert same_output(model, twin)


def test_a_device_that_is_not_there_is_named_and_all_stays(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(["blocks.0"], model, tmp_path)
    with pytest.raises(BudgetError, match="cuda:99"):
        undo_offload_to_disk(model, device=torch.device("cuda:99"))
    assert is_meta_module(model)
    assert same_output(model, twin)


@pytest.mark.parametrize("origin", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("device", [None, torch.device("cpu"), pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_device_is_where_it_comes_back_to(origin: str, device: Any, tmp_path: Path) -> None:
    model = aligned(Kinds()).to(origin)
    twin = copy.deepcopy(model).to(origin if device is None else device)
    offload_to_disk(model, disk_path=tmp_path)
    undo_offload_to_disk(model, device=device)
    expected = torch.device(origin if device is None else device)
    assert {tensor.device for _, tensor in named_tensors(model)} == {expected}
    assert_ordinary(model, twin)
    assert_trains(model, twin, torch.randn(2, 64, device=expected))


def test_buffers_can_be_left_out_of_the_cast(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    offload_to_disk(model, disk_path=tmp_path)
    undo_offload_to_disk(model, include_buffers=False, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model[1].running_mean.dtype == torch.float32


def test_leaving_out_buffers_of_nothing_is_refused_and_all_stays(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(["blocks.0"], model, tmp_path)
    with pytest.raises(PlanError, match="include_buffers"):
        undo_offload_to_disk(model, include_buffers=False)
    assert is_meta_module(model)
    assert same_output(model, twin)


def test_what_was_never_offloaded_cannot_be_undone(model: Net, twin: Net, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="nothing"):
        undo_offload_to_disk(model)
    offload_to_disk(["blocks.0"], model, tmp_path)
    with pytest.raises(StateError, match="nothing"):
        undo_offload_to_disk(model.blocks[1])
    undo_offload_to_disk(model)
    with pytest.raises(StateError, match="nothing"):
        undo_offload_to_disk(model)
    assert_ordinary(model, twin)


# ---------------------------------------------------------------- is_meta_module


def test_what_is_offloaded_counts_as_meta_and_nothing_else(model: Net, tmp_path: Path) -> None:
    assert not is_meta_module(model)
    offload_to_disk(["blocks.1.up"], model, tmp_path)
    assert not model.blocks[1].up.weight.is_meta, "it shows its true values nevertheless"
    assert is_meta_module(model.blocks[1].up)
    assert is_meta_module(model.blocks[1])
    assert is_meta_module(model)
    assert not is_meta_module(model.blocks[1].down)
    assert not is_meta_module(model.blocks[0])
    undo_offload_to_disk(model.blocks[1])
    assert not is_meta_module(model)


def test_one_meta_tensor_is_enough() -> None:
    with overspill.empty_weights():
        assert is_meta_module(Net())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert not is_meta_module(model)
    model[1].register_buffer("running_mean", torch.empty(4, device="meta"))
    assert is_meta_module(model)
    assert not is_meta_module(model[0])
    assert not is_meta_module(nn.ReLU())


def test_a_buffer_on_disk_is_enough(tmp_path: Path) -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(64, 64, dtype=torch.int8))

    model = nn.Sequential(Codes(), nn.Linear(8, 8))
    offload_to_disk(model[0], model, tmp_path)
    assert is_meta_module(model)
    undo_offload_to_disk(model[0])
    assert not is_meta_module(model)


def test_what_overspill_offloaded_to_host_memory_counts_and_can_be_undone(model: Net, twin: Net) -> None:
    overspill.offload(model, to="disk", modules=["blocks"])
    overspill.offload(model, to="cpu", modules=["blocks"])
    assert is_meta_module(model.blocks[0])
    undo_offload_to_disk(model)
    assert not is_meta_module(model)
    assert_ordinary(model, twin)


# ---------------------------------------------------------------- paths


def test_the_full_name_of_each_module(model: Net) -> None:
    assert get_module_fullname(model, model) == ""
    for path, module in model.named_modules():
        assert get_module_fullname(model=model, module=module) == path
    assert get_module_fullname(model.blocks, model.blocks[2].up) == "2.up"


def test_a_module_at_two_paths_has_the_first_one_as_its_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU()})
    model["c"] = model["a"]
    assert get_module_fullname(model, model["c"]) == "a"


def test_a_module_that_is_not_in_the_model_has_no_name(model: Net) -> None:
    with pytest.raises(PlanError, match=r"Linear.*Net"):
        get_module_fullname(model, nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"Net.*ModuleList"):
        get_module_fullname(model.blocks, model)


@pytest.mark.parametrize("path", ["norm", "blocks.1", "blocks.2.up"])
def test_a_module_is_replaced_at_its_path(path: str, model: Net) -> None:
    before, new = [name for name, _ in model.named_modules()], nn.Identity()
    assert set_submodule(model, path, new) is None  # type: ignore[func-returns-value]
    assert model.get_submodule(path) is new
    assert [name for name, _ in model.named_modules()] == [n for n in before if not n.startswith(f"{path}.")]


def test_modules_are_replaced_in_a_sequence_by_index() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))
    set_submodule(model, "1.0", nn.Tanh())
    set_submodule(model, "0", nn.Identity())
    assert [type(part) for part in model] == [nn.Identity, nn.Sequential, nn.Linear]
    assert isinstance(model[1][0], nn.Tanh)
    assert model(torch.randn(3, 4)).shape == (3, 2)


def test_a_path_that_leads_nowhere_adds_nothing(model: Net) -> None:
    before = [name for name, _ in model.named_modules()]
    for path, nearest in (("blocks.1.upp", "blocks.1.up"), ("blocks.4", "blocks.3"), ("nrom", "norm")):
        with pytest.raises(PlanError, match=rf"{path}'.*{nearest}"):
            set_submodule(model, path, nn.Identity())
    with pytest.raises(PlanError, match="model itself"):
        set_submodule(model, "", nn.Identity())
    with pytest.raises(ValueError, match=r"not an nn\.Module"):
        set_submodule(model, "norm", "no module")  # type: ignore[arg-type]
    assert [name for name, _ in model.named_modules()] == before
    assert isinstance(model.norm, nn.LayerNorm)


# ---------------------------------------------------------------- as a quantizer uses them


class Quantized(nn.Module):
    """A linear layer with 8-bit codes: its tensors are buffers, with other names and dtypes than a Linear's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        bias = linear._parameters["bias"]
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.get_buffer("codes").float() * self.get_buffer("scale")
        return nn.functional.linear(x, weight, self.bias)


@torch.inference_mode()
def quantize(model: Net, disk_path: Path | None) -> None:
    """Layer by layer, with all others on disk if there is a path."""
    for index, block in enumerate(model.blocks):
        if is_meta_module(block):
            undo_offload_to_disk(block, device=torch.device("cpu"))
        for name in ("up", "down"):
            set_submodule(model, f"blocks.{index}.{name}", Quantized(block.get_submodule(name)))  # type: ignore[arg-type]
        if disk_path is not None:
            offload_to_disk(model=model, module=block, disk_path=str(disk_path))


def test_a_model_is_quantized_layer_by_layer(tmp_path: Path) -> None:
    model = aligned(Net(width=64))
    twin = copy.deepcopy(model)
    offload_to_disk(["embed", "norm", *(f"blocks.{i}" for i in range(4))], model, tmp_path)
    quantize(model, tmp_path)
    quantize(twin, None)
    assert {name for name in on_disk(model) if name.endswith("codes")} == {
        f"blocks.{i}.{name}.codes" for i in range(4) for name in ("up", "down")
    }
    assert nbytes(stored(tmp_path)["blocks.3"]) == 2 * 128 * 64 + 128 * 4 + 128 * 4 + 64 * 4
    assert same_output(model, twin)
    assert undo_offload_to_disk(module=model, include_buffers=True, delete_offload_folders=True) is model
    assert list(tmp_path.iterdir()) == []
    assert same_output(model, twin)
    assert_same_state(model, twin)
    assert managed(model) is None


def test_a_module_on_disk_may_be_replaced(model: Net, twin: Net, tmp_path: Path) -> None:
    offload_to_disk(model.blocks, model, tmp_path)
    for net in (model, twin):
        set_submodule(net, "blocks.1.up", Quantized(net.blocks[1].up))
    assert same_output(model, twin)
    offload_to_disk(["embed"], model, tmp_path)
    assert same_output(model, twin)
    undo_offload_to_disk(model)
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(model, twin)


def test_many_rounds_leave_nothing_behind(model: Net, twin: Net, tmp_path: Path) -> None:
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, twin)]
    for _, block in itertools.product(range(2), range(4)):
        offload_to_disk(model.blocks[block], model, tmp_path)
        assert is_meta_module(model)
        undo_offload_to_disk(model.blocks[block])
        assert list(tmp_path.iterdir()) == []
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            train_step(net, IDS)
            optimizer.step()
    assert_ordinary(model, twin)
