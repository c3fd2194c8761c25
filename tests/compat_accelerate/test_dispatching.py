"""Models loaded, dispatched, offloaded and undone: what Accelerate gets wrong is right, and nothing is lost."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import overspill
from overspill.compat.accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    has_offloaded_params,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    remove_hook_from_submodules,
)
from overspill.errors import CheckpointMismatchError, OffloadFolderError, PlanError, StateError
from overspill.managed import managed
from overspill.moving import tier_of
from overspill.plan import Tier
from support import Net, aligned, run, save_checkpoint, streamed_units

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
THREE = {"embed": "cpu", "head": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "blocks.2": "disk", "blocks.3": "cpu"}
THREE |= {"norm": "cpu"}


@pytest.fixture
def model() -> Net:
    return aligned(Net()).eval()  # type: ignore[return-value]


@pytest.fixture
def twin(model: Net) -> Net:
    return copy.deepcopy(model)


@pytest.fixture
def checkpoint(model: Net, tmp_path: Path) -> Path:
    return save_checkpoint(model, tmp_path / "checkpoint")


def skeleton() -> Net:
    with init_empty_weights():
        return Net().eval()  # type: ignore[return-value]


def same(model: nn.Module, twin: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(model(IDS.to(next(model.parameters()).device)).cpu(), run(twin, IDS))


def on_disk(model: nn.Module) -> set[str]:
    """The blocks and other children with parameters on disk."""
    names = (name for name, parameter in model.named_parameters() if tier_of(parameter) is Tier.DISK)
    return {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in names}


def without(checkpoint: Path, *names: str) -> Path:
    """A checkpoint that lacks some tensors."""
    path = checkpoint.parent / "less.safetensors"
    save_file({name: tensor for name, tensor in load_file(checkpoint).items() if name not in names}, path)
    return path


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}, "auto"])
@pytest.mark.parametrize("strict", [True, False])
def test_missing_keys_are_reported(checkpoint: Path, device_map: Any, strict: bool) -> None:
    """Accelerate leaves such parameters on meta, also with strict=True."""
    less = without(checkpoint, "blocks.1.up.weight")
    model = skeleton()
    with pytest.raises(CheckpointMismatchError, match=r"blocks\.1\.up\.weight"):
        load_checkpoint_and_dispatch(model, less, device_map=device_map, strict=strict)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize("device_map", [None, {"": "disk"}])
def test_unexpected_keys_are_reported_if_that_is_wanted(checkpoint: Path, twin: Net, device_map: Any) -> None:
    more = checkpoint.parent / "more.safetensors"
    save_file({**load_file(checkpoint), "another.weight": torch.ones(3)}, more)
    with pytest.raises(CheckpointMismatchError, match=r"another\.weight"):
        load_checkpoint_and_dispatch(skeleton(), more, device_map=device_map, strict=True)
    assert same(load_checkpoint_and_dispatch(skeleton(), more, device_map=device_map), twin)


def test_what_a_checkpoint_lacks_keeps_its_values(checkpoint: Path, model: Net, twin: Net) -> None:
    less = without(checkpoint, "blocks.1.shift")
    other = aligned(Net()).eval()
    load_checkpoint_in_model(other, less)
    assert torch.equal(other.blocks[1].up.weight, twin.blocks[1].up.weight)
    assert not torch.equal(other.blocks[1].shift, twin.blocks[1].shift)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, THREE, "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", "torch.float64"])
def test_a_dtype_is_cast_to_with_and_without_a_map(checkpoint: Path, twin: Net, device_map: Any, dtype: Any) -> None:
    """Accelerate ignores it without a map."""
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    model = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map=device_map, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert same(model, aligned(twin.to(wanted)))


@pytest.mark.parametrize("device_map", [None, THREE])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", None])
def test_modules_are_kept_in_fp32(model: Net, tmp_path: Path, device_map: Any, dtype: str | None) -> None:
    """Accelerate does so for float16 only."""
    with torch.no_grad():
        model.norm.weight.add_(1e-6)  # what float16 cannot hold
    path = save_checkpoint(model, tmp_path)
    loaded = skeleton().half()
    load_checkpoint_in_model(loaded, path, device_map, dtype=dtype, keep_in_fp32_modules=["norm"])
    for name, parameter in loaded.named_parameters():
        other = torch.float16 if dtype is None else getattr(torch, dtype)
        assert parameter.dtype == (torch.float32 if "norm" in name else other), name
    assert torch.equal(loaded.norm.weight, model.norm.weight)


def test_a_load_that_fails_leaves_dtypes_as_they_were(checkpoint: Path) -> None:
    model = skeleton()
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointMismatchError):
        load_checkpoint_in_model(model, without(checkpoint, "norm.weight"), dtype="float16")
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == before


def test_without_a_map_a_model_in_memory_stays_itself(checkpoint: Path, twin: Net) -> None:
    """As with `load_state_dict`, an optimizer goes on working."""
    model = aligned(Net()).eval()
    held = [*model.parameters(), *model.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_checkpoint_in_model(model, checkpoint)
    assert all(a is b for a, b in zip(held, [*model.parameters(), *model.buffers()], strict=True))
    assert model.head.weight is model.embed.weight
    assert managed(model) is None
    assert same(model, twin)
    model(IDS).sum().backward()
    optimizer.step()
    assert not same(model, twin)
    load_checkpoint_in_model(model, checkpoint)  # as often as one likes
    assert same(model, twin)


def test_ties_stay_ties(checkpoint: Path, twin: Net) -> None:
    model = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map={"": "disk"})
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        for net in (model, twin):
            net.head.weight.add_(1)
    assert same(model, twin)
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embed.weight
    assert same(model, twin)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("offload_buffers", [True, False])
def test_buffers_of_modules_on_disk_are_loaded(tmp_path: Path, offload_buffers: bool) -> None:
    """Accelerate leaves a BatchNorm's mean at 0 without offload_buffers."""
    twin = aligned(Statistics()).eval()
    for buffer in twin.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 2)
    save_file(twin.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Statistics().eval()
    load_checkpoint_and_dispatch(
        model, tmp_path, device_map={"": "disk"}, offload_folder=tmp_path, offload_buffers=offload_buffers
    )
    x = torch.randn(4, 32)
    assert len(streamed_units(model)) == 2
    assert torch.equal(model(x), twin(x))


def test_an_offload_folder_is_used_for_what_is_converted_only(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    model = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map={"": "disk"}, offload_folder=folder)
    assert not folder.exists()
    del model
    model = load_checkpoint_and_dispatch(
        skeleton(), checkpoint, device_map={"": "disk"}, offload_folder=folder, dtype="float16"
    )
    assert len(list(folder.iterdir())) == 1
    assert on_disk(model)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"device_map": "fastest"}, "'fastest'.*'balanced_low_0'"),
        ({"device_map": {"embed": "cpu"}}, r"says nothing about.*blocks\.0"),
        ({"full_state_dict": False}, "full_state_dict"),
        ({"broadcast_from_rank0": True}, "broadcast_from_rank0"),
        ({"dtype": "float17"}, "float17"),
        ({"dtype": torch.int8, "device_map": "auto"}, "int8"),
    ],
)
def test_what_cannot_be_done_is_refused(checkpoint: Path, options: dict[str, Any], culprit: str) -> None:
    model = skeleton()
    with pytest.raises((PlanError, ValueError), match=culprit):
        load_checkpoint_and_dispatch(model, checkpoint, **options)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_quantization_on_the_way_is_refused(checkpoint: Path) -> None:
    with pytest.raises(PlanError, match="offload_8bit_bnb"):
        load_checkpoint_in_model(skeleton(), checkpoint, {"": "cpu"}, offload_8bit_bnb=True)


# ---------------------------------------------------------------- dispatching


def test_a_model_in_memory_is_dispatched_and_keeps_its_parameters(model: Net, twin: Net, tmp_path: Path) -> None:
    held = [*model.parameters()]
    assert dispatch_model(model, THREE, offload_dir=tmp_path) is model
    assert on_disk(model) == {"blocks.0", "blocks.2"}
    assert same(model, twin)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert model.hf_device_map == THREE


def test_a_folder_need_not_be_named(model: Net, twin: Net) -> None:
    dispatch_model(model, THREE)
    assert on_disk(model) == {"blocks.0", "blocks.2"}
    assert same(model, twin)


def test_a_model_on_one_device_is_an_ordinary_one(model: Net, twin: Net) -> None:
    dispatch_model(model, {"": "cpu"})
    assert managed(model) is None
    assert model.hf_device_map == {"": "cpu"}
    assert same(model, twin)


def test_hooks_can_be_forced(model: Net, twin: Net, checkpoint: Path) -> None:
    """On one accelerator, inputs come to the model only then. On the CPU there is nothing to bring."""
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    loaded = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map={"": "cpu"}, force_hooks=True)
    for net in (model, loaded):
        assert managed(net) is not None
        assert net._compiled_call_impl is not None
        assert same(net, twin)
        remove_hook_from_submodules(net)
        assert managed(net) is None
        assert net._compiled_call_impl is None


@pytest.mark.gpu
@pytest.mark.parametrize("force_hooks", [True, False])
def test_forced_hooks_bring_inputs_to_one_accelerator(model: Net, twin: Net, force_hooks: bool) -> None:
    dispatch_model(model, {"": 0}, force_hooks=force_hooks)
    if not force_hooks:
        with pytest.raises(RuntimeError, match="same device"):
            model(IDS)
        return
    output = model(IDS)
    assert output.device.type == "cpu"
    assert torch.equal(output, twin.to("cuda:0")(IDS.to("cuda:0")).cpu())


@pytest.mark.parametrize("load", [True, False])
def test_a_dispatched_model_can_be_dispatched_again(
    model: Net, twin: Net, checkpoint: Path, load: bool, tmp_path: Path
) -> None:
    if load:
        model = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map=THREE)
    else:
        dispatch_model(model, THREE, offload_dir=tmp_path / "offload")
    held = [*model.parameters()]
    for device_map, there in (
        ({"": "disk"}, {"embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm"}),
        ({"blocks.3": "disk", "": "cpu"}, {"blocks.3"}),
        (THREE, {"blocks.0", "blocks.2"}),
        ({"": "cpu"}, set()),
    ):
        dispatch_model(model, device_map, offload_dir=tmp_path / "offload")
        assert on_disk(model) == there
        assert model.hf_device_map == device_map
        assert same(model, twin)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight


def test_a_dispatch_that_is_there_already_moves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    model = skeleton()
    load_checkpoint_in_model(model, checkpoint, THREE)
    manager = managed(model)
    dispatch_model(model, THREE, offload_dir=tmp_path / "offload")
    assert managed(model) is manager
    assert not (tmp_path / "offload").exists()


def test_a_part_of_a_dispatched_model_is_not_dispatched_by_itself(checkpoint: Path) -> None:
    model = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map={"": "disk"})
    with pytest.raises(StateError, match="part of a model"):
        dispatch_model(model.blocks[0], {"": "cpu"})


def test_a_model_that_accelerate_has_dispatched_is_taken_over(model: Net, twin: Net, tmp_path: Path) -> None:
    accelerate.dispatch_model(model, THREE, offload_dir=tmp_path, offload_buffers=True)
    assert has_offloaded_params(model.blocks[0].up)
    dispatch_model(model, {"blocks.1": "disk", "": "cpu"})
    assert on_disk(model) == {"blocks.1"}
    assert same(model, twin)
    assert not any("_hf_hook" in vars(module) for module in model.modules())


def test_hooks_of_accelerate_are_removed_with_the_values_brought_back(model: Net, twin: Net, tmp_path: Path) -> None:
    accelerate.dispatch_model(model, THREE, offload_dir=tmp_path, offload_buffers=True)
    remove_hook_from_submodules(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not any("_hf_hook" in vars(module) for module in model.modules())
    assert same(model, twin)


def test_values_are_taken_from_a_state_dict(model: Net, twin: Net, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in twin.state_dict().items() if name != "embed.weight"}
    for net in (skeleton(), aligned(Net()).eval()):
        held = [*net.parameters()]
        was_meta = held[0].is_meta
        dispatch_model(net, THREE, state_dict=state, offload_dir=None)
        assert same(net, twin)
        assert net.head.weight is net.embed.weight
        assert was_meta or all(a is b for a, b in zip(held, net.parameters(), strict=True))
    with pytest.raises(CheckpointMismatchError, match=r"norm\.weight"):
        dispatch_model(skeleton(), THREE, state_dict={"norm.weight": torch.ones(3)})


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    for refused in (
        lambda: dispatch_model(skeleton(), THREE),
        lambda: cpu_offload(skeleton()),
        lambda: disk_offload(skeleton(), tmp_path),
    ):
        with pytest.raises(StateError, match="is on the meta device"):
            refused()


def test_an_index_of_another_program_is_refused(model: Net) -> None:
    with pytest.raises(PlanError, match=r"offload_index.*load_checkpoint_and_dispatch"):
        dispatch_model(model, THREE, offload_index={"embed.weight": {"dtype": "float32"}})
    with pytest.raises(PlanError, match="infer_auto_device_map"):
        dispatch_model(model, "auto")  # type: ignore[arg-type]


class Keyed(nn.Module):
    """Notes where its arguments are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.seen: dict[str, str] = {}

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = {"x": x.device.type, "cache": cache.device.type}
        return {"x": self.blocks[1](self.blocks[0](x)), "cache": cache}


@pytest.mark.parametrize("skip_keys", ["cache", ["cache", "other"]])
def test_skipped_keys_are_said_and_unsaid(skip_keys: Any, tmp_path: Path) -> None:
    model = Keyed()
    dispatch_model(model, {"": "disk"}, skip_keys=skip_keys)
    assert "cache" in model._skip_keys_device_placement
    remove_hook_from_submodules(model)
    assert not hasattr(model, "_skip_keys_device_placement")
    with pytest.raises(StateError):
        dispatch_model(copy.deepcopy(model).to("meta"), {"": "disk"}, skip_keys=skip_keys)


def test_keys_are_not_skipped_after_a_failure(checkpoint: Path) -> None:
    model = skeleton()
    with pytest.raises(CheckpointMismatchError):
        load_checkpoint_and_dispatch(
            model, without(checkpoint, "norm.weight"), device_map={"": "disk"}, skip_keys="cache"
        )
    assert not hasattr(model, "_skip_keys_device_placement")


@pytest.mark.gpu
@pytest.mark.parametrize("skip_keys", ["cache", None])
def test_skipped_keys_stay_where_they_are(skip_keys: str | None) -> None:
    model = Keyed()
    dispatch_model(model, {"blocks.0": 0, "blocks.1": "cpu"}, skip_keys=skip_keys)
    output = model(x=torch.ones(2, 64), cache=torch.ones(2))
    assert model.seen == {"x": "cuda", "cache": "cuda" if skip_keys is None else "cpu"}
    assert output["x"].device.type == output["cache"].device.type == "cpu"


# ---------------------------------------------------------------- offloading all of it


def test_a_stale_index_is_not_trusted(model: Net, twin: Net, tmp_path: Path) -> None:
    """Accelerate computes with the weights of the model that was offloaded there before."""
    accelerate.disk_offload(aligned(Net()), tmp_path)
    stale = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "index.json" in stale
    disk_offload(model, tmp_path)
    assert same(model, twin)
    remove_hook_from_submodules(model)
    assert same(model, twin)
    assert {name: (tmp_path / name).read_bytes() for name in stale} == stale


def test_two_models_do_not_share_a_folder(model: Net, twin: Net, tmp_path: Path) -> None:
    disk_offload(model, tmp_path)
    other = aligned(Net(blocks=2)).eval()
    with pytest.raises(OffloadFolderError):
        disk_offload(other, tmp_path)
    assert same(model, twin)
    assert managed(other) is None


def test_ties_and_objects_survive_the_way_to_disk_and_back(model: Net, twin: Net, tmp_path: Path) -> None:
    held = [*model.parameters()]
    disk_offload(model, tmp_path)
    assert model.head.weight is model.embed.weight
    remove_hook_from_submodules(model)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight
    assert vars(model).keys() == vars(twin).keys()
    model(IDS).sum().backward()
    assert held[0].grad is not None


def test_edits_are_not_lost(model: Net, twin: Net, tmp_path: Path) -> None:
    """Accelerate reports success, and computes with the old values."""
    other = aligned(Net()).eval()
    disk_offload(model, tmp_path)
    model.load_state_dict(other.state_dict())
    assert same(model, other)
    assert not same(model, twin)


def test_a_model_that_computes_on_the_cpu_is_where_it_computes(
    model: Net, twin: Net, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert cpu_offload(model) is model
    assert "computes on the CPU" in caplog.text
    assert managed(model) is None
    assert same(model, twin)


def test_what_is_on_disk_can_go_to_host_memory(model: Net, twin: Net, tmp_path: Path) -> None:
    disk_offload(model, tmp_path)
    cpu_offload(model)
    assert on_disk(model) == set()
    assert {tier_of(parameter) for parameter in model.parameters()} == {Tier.CPU}
    assert same(model, twin)


def test_a_state_dict_is_taken_before_it_is_offloaded(twin: Net) -> None:
    model = skeleton()
    for name, buffer in model.named_buffers():
        assert not buffer.is_meta, name
    cpu_offload(model, state_dict=twin.state_dict())
    assert same(model, twin)


# ---------------------------------------------------------------- undone


def test_an_ordinary_model_has_no_hooks_to_remove(model: Net, twin: Net) -> None:
    remove_hook_from_submodules(model)
    assert same(model, twin)


def test_a_loaded_model_becomes_an_ordinary_one(checkpoint: Path, twin: Net) -> None:
    """Accelerate leaves what was on disk on meta."""
    model = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map=THREE)
    remove_hook_from_submodules(model)
    assert managed(model) is None
    assert not hasattr(model, "hf_device_map")
    assert not any(has_offloaded_params(module) for module in model.modules())
    checkpoint.unlink()
    assert same(model, twin)
    assert same(copy.deepcopy(model), twin)


def test_hooks_are_removed_from_a_part(model: Net, twin: Net, tmp_path: Path) -> None:
    disk_offload(model, tmp_path)
    remove_hook_from_submodules(model.blocks[1])
    assert on_disk(model) == {"embed", "blocks.0", "blocks.2", "blocks.3", "norm"}
    assert same(model, twin)


@pytest.mark.parametrize("way", [disk_offload, cpu_offload])
@pytest.mark.gpu
def test_a_model_on_an_accelerator_comes_back_there(model: Net, way: Callable[..., Any], tmp_path: Path) -> None:
    model.to("cuda:0")
    twin = copy.deepcopy(model)
    way(model, *([tmp_path] if way is disk_offload else []))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert same(model, twin)
    remove_hook_from_submodules(model)
    assert {str(parameter.device) for parameter in model.parameters()} == {"cuda:0"}
    assert same(model, twin)


def test_a_model_is_saved_from_where_it_is(checkpoint: Path, twin: Net, tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map=THREE)
    overspill.save(model, tmp_path / "out", progress=False)
    again = load_checkpoint_and_dispatch(skeleton(), tmp_path / "out", device_map="auto", strict=True)
    assert same(again, twin)


def test_maps_survive_json(checkpoint: Path, twin: Net) -> None:
    model = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map="auto", max_memory={"cpu": "60KB"})
    device_map = json.loads(json.dumps(model.hf_device_map))
    again = load_checkpoint_and_dispatch(skeleton(), checkpoint, device_map=device_map)
    assert on_disk(again) == on_disk(model) != set()
    assert same(again, twin)
