"""A module's own parameters are on a device for a while, and what is written there is the model's from then on."""

import copy
from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn

from overspill.compat.accelerate import (
    align_module_device,
    disk_offload,
    has_offloaded_params,
    init_empty_weights,
    remove_hook_from_submodules,
)
from overspill.errors import StateError
from overspill.homes import DiskTensor
from support import Net, Where, aligned, run

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture
def model(where: Where) -> Net:
    model = aligned(Net()).eval().to(where.device)
    where.offload(model, min_bytes=0)
    return model  # type: ignore[return-value]


@pytest.fixture
def twin(model: Net, where: Where) -> Net:
    return aligned(copy.deepcopy(model).to(where.device))  # type: ignore[return-value]


def same(model: nn.Module, twin: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(model(IDS), run(twin, IDS))


def test_parameters_are_ordinary_ones_on_the_device(model: Net, twin: Net, where: Where) -> None:
    linear = model.blocks[1].up
    home = linear.weight
    with align_module_device(linear):
        assert str(linear.weight.device) == where.device
        assert linear.weight.data_ptr()
        assert isinstance(linear.weight, nn.Parameter)
        assert linear.weight.requires_grad
        assert torch.equal(linear.weight, twin.blocks[1].up.weight)
        assert has_offloaded_params(model.blocks[1].down)  # only the module's own
    assert linear.weight is home
    assert has_offloaded_params(linear)
    assert same(model, twin)


EDITS = {
    "in place": lambda linear: linear.weight.mul_(2),
    "data": lambda linear: linear.weight.data.mul_(2),
    "data replaced": lambda linear: setattr(linear.weight, "data", linear.weight.data * 2),
    "detached": lambda linear: linear.weight.detach().mul_(2),
    "assigned": lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.detach() * 2)),
    "loaded": lambda linear: linear.load_state_dict({**linear.state_dict(), "weight": linear.weight * 2}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_written_is_kept(model: Net, twin: Net, edit: str) -> None:
    """Accelerate drops it."""
    with torch.no_grad():
        with align_module_device(model.blocks[1].up):
            EDITS[edit](model.blocks[1].up)
        EDITS[edit](twin.blocks[1].up)
    assert same(model, twin)
    remove_hook_from_submodules(model)
    assert torch.equal(model.blocks[1].up.weight, twin.blocks[1].up.weight)
    with torch.no_grad():  # an ordinary model, to which its callers bring its inputs
        assert torch.equal(run(model, IDS), run(twin, IDS))


def test_what_is_only_read_stays_on_disk(tmp_path: Path) -> None:
    model = disk_offload(aligned(Net()), tmp_path)
    with align_module_device(model.blocks[1].up), torch.no_grad():
        _ = model.blocks[1].up.weight.data.sum()
        model.blocks[1].up.bias.add_(1)
    weight, bias = model.blocks[1].up.weight, model.blocks[1].up.bias
    assert isinstance(weight, DiskTensor)
    assert weight._overspill_values.memory is None
    assert isinstance(bias, DiskTensor)
    assert bias._overspill_values.memory is not None


def test_edits_are_kept_if_what_follows_fails(model: Net, twin: Net) -> None:
    def edit(net: Net) -> None:
        with torch.no_grad(), align_module_device(net.norm):
            net.norm.weight.add_(1)
            raise KeyError

    for net in (model, twin):
        with pytest.raises(KeyError):
            edit(net)
    assert same(model, twin)


def test_an_edit_shows_wherever_a_weight_is_tied(model: Net, twin: Net) -> None:
    with torch.no_grad():
        with align_module_device(model.head):
            model.head.weight.add_(1)
        twin.head.weight.add_(1)
    assert model.head.weight is model.embed.weight
    assert same(model, twin)


def test_the_model_runs_meanwhile_with_what_was_written(model: Net, twin: Net) -> None:
    with torch.no_grad(), align_module_device(model.blocks[1].up):
        model.blocks[1].up.weight.mul_(2)
        twin.blocks[1].up.weight.mul_(2)
        assert same(model, twin)
        model.blocks[1].up.weight.mul_(2)
        twin.blocks[1].up.weight.mul_(2)
        assert same(model, twin)
    assert same(model, twin)


def test_contexts_nest(model: Net, twin: Net) -> None:
    linear = model.blocks[0].down
    with torch.no_grad(), align_module_device(linear):
        with align_module_device(linear, "cpu"):
            linear.weight.add_(1)
        linear.weight.add_(1)
    with torch.no_grad():
        twin.blocks[0].down.weight.add_(1).add_(1)
    assert same(model, twin)


def test_gradients_go_home(model: Net, twin: Net) -> None:
    for net in (model, twin):
        with align_module_device(net.norm):
            for _ in range(2):
                net.norm.weight.square().sum().backward()
    mine, theirs = model.norm.weight.grad, twin.norm.weight.grad
    assert mine is not None
    assert theirs is not None
    assert torch.equal(mine.cpu(), theirs.cpu())


def test_a_weight_of_another_shape_takes_the_place_of_the_old_one(model: Net) -> None:
    linear = model.blocks[0].down
    with align_module_device(linear):
        linear.weight.data = torch.ones(3, 64, device=linear.weight.device)
    assert linear.weight.shape == (3, 64)
    assert isinstance(linear.weight, nn.Parameter)
    with torch.no_grad():
        assert torch.equal(model.blocks[0].down.weight.cpu(), torch.ones(3, 64))


def test_inside_a_forward_the_weights_are_there_already(model: Net, twin: Net, where: Where) -> None:
    seen = []

    def look(module: nn.Module, args: object) -> None:
        with align_module_device(module, where.device):
            seen.append((str(module.weight.device), module.weight.detach().cpu().clone()))

    model.blocks[2].up.register_forward_pre_hook(look)
    assert same(model, twin)
    assert seen[0][0] == where.device
    assert torch.equal(seen[0][1], twin.blocks[2].up.weight.cpu())
    assert same(model, twin)


def test_an_ordinary_module_is_left_alone(device: str) -> None:
    linear = nn.Linear(4, 4).to(device)
    weight = linear.weight
    with align_module_device(linear):
        assert linear.weight is weight
    with align_module_device(linear, device):
        assert linear.weight is weight


@pytest.mark.gpu
def test_an_ordinary_module_visits_another_device() -> None:
    linear = nn.Linear(4, 4)
    weight, values = linear.weight, linear.weight.detach().clone()
    with torch.no_grad(), align_module_device(linear, "cuda:0"):
        assert linear.weight.device.type == linear.bias.device.type == "cuda"
        linear.weight.add_(1)
    assert linear.weight is weight
    assert torch.equal(weight, values + 1)


def test_what_has_no_values_or_is_accelerates_is_refused() -> None:
    with init_empty_weights():
        linear = nn.Linear(4, 4)
    with pytest.raises(StateError, match="meta"), align_module_device(linear, "cpu"):
        pass
    assert linear.weight.is_meta
    model = accelerate.cpu_offload(nn.Sequential(nn.Linear(4, 4)))
    assert has_offloaded_params(model[0])
    with pytest.raises(StateError, match=r"overspill\.adopt"), align_module_device(model[0]):
        pass
