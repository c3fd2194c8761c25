"""Memory is shared out and maps are made: what Accelerate's functions promise, without what they get wrong."""

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import Any

import accelerate
import accelerate.utils
import pytest
import torch
from torch import nn

from overspill.compat.accelerate import get_balanced_memory, get_max_memory, infer_auto_device_map, init_empty_weights
from overspill.compat.accelerate.planning import plan_by_map
from overspill.errors import BudgetError, PlanError
from overspill.plan import Plan, Tier
from support import Block, Net

MIB = 1 << 20


def empty(**options: Any) -> Net:
    with init_empty_weights():
        return Net(**options)


def linears(count: int, width: int = 1024) -> nn.Sequential:
    """Layers of 4 MiB at the usual width."""
    with init_empty_weights():
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


def placed_bytes(model: nn.Module, device_map: Mapping[str, Any]) -> Counter[Any]:
    """Bytes of parameters on each device, by the longest prefix of their first names."""
    held: Counter[Any] = Counter()
    for name, parameter in model.named_parameters():
        prefix = max((path for path in device_map if f"{name}.".startswith(f"{path}." if path else "")), key=len)
        held[device_map[prefix]] += parameter.nbytes
    return held


# ---------------------------------------------------------------- memory


def test_sizes_are_read_and_accelerators_come_first() -> None:
    given = {"disk": "900GB", "cpu": "30GiB", 1: "10GIB", 0: 5, 2: 1.5e9}
    memory = get_max_memory(given)  # type: ignore[arg-type]
    assert memory == {0: 5, 1: 10 << 30, 2: 1_500_000_000, "cpu": 30 << 30, "disk": 9 * 10**11}
    assert list(memory) == [0, 1, 2, "cpu", "disk"]
    assert given == {"disk": "900GB", "cpu": "30GiB", 1: "10GIB", 0: 5, 2: 1.5e9}
    assert memory == accelerate.utils.get_max_memory(dict(given))


def test_without_sizes_it_is_what_is_free() -> None:
    ours, theirs = get_max_memory(), accelerate.utils.get_max_memory()
    assert list(ours) == list(theirs)
    assert all(abs(ours[key] - theirs[key]) < 1 << 30 for key in ours)


@pytest.mark.parametrize(
    ("key", "size", "culprit"),
    [("gpu", "1GB", "'gpu'"), (0, "10 gigs", "'10 gigs'"), (0, -1, "negative"), (-1, 5, "-1"), (0, None, "None")],
)
def test_what_is_no_memory_is_named(key: Any, size: Any, culprit: str) -> None:
    with pytest.raises(BudgetError, match=culprit):
        get_max_memory({key: size})


def test_accelerators_that_are_not_there_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        get_max_memory({90: "1GB", "cpu": "1GB"})
    assert "[90]" in caplog.text


def test_a_model_is_spread_evenly() -> None:
    model, max_memory = linears(12), {0: "1GB", 1: "1GB", 2: "1GB", "cpu": "1GB"}
    device_map = infer_auto_device_map(model, get_balanced_memory(model, max_memory))
    assert placed_bytes(model, device_map) == {0: 16 * MIB, 1: 16 * MIB, 2: 16 * MIB}
    assert max_memory == {0: "1GB", 1: "1GB", 2: "1GB", "cpu": "1GB"}
    theirs = accelerate.utils.get_balanced_memory(model, dict(max_memory))
    assert list(get_balanced_memory(model, max_memory)) == list(theirs)


def test_a_small_accelerator_gets_what_it_can_hold() -> None:
    model = linears(12)
    memory = get_balanced_memory(model, {0: 9 * MIB, 1: "1GB", 2: "1GB"})
    held = placed_bytes(model, infer_auto_device_map(model, memory))
    assert held == {0: 8 * MIB, 1: 20 * MIB, 2: 20 * MIB}


def test_the_first_accelerator_gets_only_what_the_others_cannot_hold() -> None:
    model = linears(12)
    memory = get_balanced_memory(model, {0: "1GB", 1: "1GB", 2: "1GB"}, low_zero=True)
    assert placed_bytes(model, infer_auto_device_map(model, memory)) == {1: 24 * MIB, 2: 24 * MIB}
    memory = get_balanced_memory(model, {0: "1GB", 1: 17 * MIB, 2: 17 * MIB}, low_zero=True)
    assert placed_bytes(model, infer_auto_device_map(model, memory)) == {0: 16 * MIB, 1: 16 * MIB, 2: 16 * MIB}


def test_what_does_not_fit_is_not_balanced() -> None:
    memory: dict[int | str, int] = {0: 17 * MIB, 1: 17 * MIB, "cpu": 5 * MIB}
    assert get_balanced_memory(linears(12), memory) == memory
    assert get_balanced_memory(linears(2), {0: 17 * MIB, "cpu": 5}) == {0: 17 * MIB, "cpu": 5}


# ---------------------------------------------------------------- maps


def test_a_map_fills_accelerators_then_the_cpu_then_the_disk() -> None:
    model = linears(12)
    max_memory = {0: 16 * MIB, 1: 8 * MIB, "cpu": 13 * MIB}
    before = dict(max_memory)
    held = placed_bytes(model, infer_auto_device_map(model, max_memory))
    assert max_memory == before
    assert held[1] == 8 * MIB
    assert held["cpu"] == 12 * MIB
    assert held["disk"] > 0
    assert sum(held.values()) == 48 * MIB


class Layer(nn.Module):
    """2 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def large_first_layer() -> nn.Module:
    with init_empty_weights():
        return nn.Sequential(nn.Embedding(4096, 512), *[Layer() for _ in range(8)])  # 8 MiB, and 2 each


@pytest.mark.parametrize("size", [9.9, 11, 13])
def test_an_accelerator_is_not_left_out_because_the_first_layer_is_large(size: float) -> None:
    """Accelerate goes on to the next device when the first layer does not fit, and never comes back."""
    model, max_memory = large_first_layer(), {0: int(size * MIB), "cpu": 1 << 30}
    device_map = infer_auto_device_map(model, max_memory, no_split_module_classes=["Layer"])
    theirs = accelerate.infer_auto_device_map(model, dict(max_memory), no_split_module_classes=["Layer"])
    assert (0 in theirs.values()) == (size > 10)
    assert 0 in device_map.values()
    plan = plan_by_map(model, device_map)
    assert plan.device == torch.device("cuda:0")
    assert plan.cpu_bytes == placed_bytes(model, device_map)["cpu"]
    assert plan.resident_bytes + plan.window <= size * MIB


def test_a_map_that_was_edited_still_has_a_window_for_its_largest_part() -> None:
    model = large_first_layer()
    device_map = infer_auto_device_map(model, {0: 13 * MIB, "cpu": 1 << 30}, no_split_module_classes=["Layer"])
    assert device_map.pop("0") == 0
    plan = plan_by_map(model, {**device_map, "0": "disk"})
    assert plan.window >= 8 * MIB
    device_map["0"] = "disk"
    assert plan_by_map(model, device_map).window == 8 * MIB


def test_everything_that_fits_is_one_entry() -> None:
    assert infer_auto_device_map(linears(3), {0: "1GB"}) == {"": 0}
    assert infer_auto_device_map(linears(3), {"cpu": "1GB"}) == {"": "cpu"}
    assert infer_auto_device_map(linears(3), {}) == {"": "disk"}
    assert infer_auto_device_map(linears(3), {0: 0, "cpu": "1GB"}) == {"": "cpu"}


def test_entries_of_one_device_are_grouped_if_that_is_wanted() -> None:
    model = empty(blocks=3, width=256)
    memory: dict[int | str, int] = {0: 4 * MIB, "cpu": "1GB"}  # type: ignore[dict-item]
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert infer_auto_device_map(model, {0: "1GB"}, clean_result=False) == dict.fromkeys(
        ["embed", "blocks", "norm", "head"], 0
    )
    ungrouped = infer_auto_device_map(model, {0: 2 * MIB, "cpu": "1GB"}, clean_result=False)
    assert {name for path in ungrouped for name in names if path.startswith(name)} == set(names)
    grouped = infer_auto_device_map(model, {0: 2 * MIB, "cpu": "1GB"})
    assert len(grouped) < len(ungrouped)
    assert placed_bytes(model, grouped) == placed_bytes(model, ungrouped)
    assert placed_bytes(model, infer_auto_device_map(model, memory)).keys() == {0}


@pytest.mark.parametrize("sizes", [(3, 3, 4), (0, 8, 4), (12, 0, 0), (4, 4, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_map_means_the_plan_that_it_was_made_of(sizes: tuple[int, int, int], tied: bool) -> None:
    model = empty(blocks=8, width=256, tied=tied)
    gpu, other, cpu = (size * MIB for size in sizes)
    memory: dict[int | str, int | str] = {0: gpu, 1: other, "cpu": cpu}
    device_map = infer_auto_device_map(model, memory)
    held = placed_bytes(model, device_map)
    assert held[0] <= gpu
    assert held[1] <= other
    assert held["cpu"] <= cpu
    plan = Plan.from_device_map(model, device_map)
    on = {Tier.DEVICE: plan.resident_bytes, Tier.CPU: plan.cpu_bytes, Tier.DISK: plan.disk_bytes}
    rounding = 256 * 200  # a slab's alignment
    assert abs(on[Tier.CPU] - held["cpu"]) <= rounding
    assert abs(on[Tier.DISK] - held["disk"]) <= rounding
    accelerate.utils.check_device_map(model, device_map)  # all names of a tie are in it, and no name that is none


def test_the_first_entry_is_where_something_computes() -> None:
    """Pipelines send their inputs there."""
    device_map = infer_auto_device_map(empty(blocks=8, width=256), {0: 3 * MIB, 1: 3 * MIB, "cpu": 4 * MIB})
    assert [*dict.fromkeys(device_map.values())] == [0, 1, "cpu", "disk"]


def test_no_split_classes_are_not_split() -> None:
    model = empty(blocks=6, width=256)
    memory: dict[int | str, int] = {0: 5 * MIB, "cpu": 1 << 30}
    for given in (["Block"], "Block", ["Block", "SomeOtherBlock"], None, []):
        device_map = infer_auto_device_map(model, memory, no_split_module_classes=given)
        assert not any(path.startswith("blocks.") and path.count(".") > 1 for path in device_map)


def test_an_unknown_class_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        infer_auto_device_map(empty(), {0: "1GB"}, no_split_module_classes=["Blok"])
    assert "Blok" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, "float16", "torch.float16"])
def test_a_dtype_halves_the_sizes(dtype: Any) -> None:
    model = linears(8)
    assert placed_bytes(model, infer_auto_device_map(model, {0: 17 * MIB}, dtype=dtype)) == {0: 32 * MIB}
    assert placed_bytes(model, infer_auto_device_map(model, {0: 17 * MIB}))["disk"] > 0


def test_sizes_of_quantized_weights_are_planned_with() -> None:
    model = linears(8)
    assert infer_auto_device_map(model, {0: 9 * MIB}, dtype=torch.int8) == {"": 0}
    assert infer_auto_device_map(model, {0: 9 * MIB}, dtype=torch.float16) != {"": 0}


def test_special_dtypes_count() -> None:
    model = linears(8)
    special = {"0.weight": torch.float32, "1.weight": "float32"}
    assert infer_auto_device_map(model, {0: 17 * MIB}, dtype=torch.float16, special_dtypes=special) != {"": 0}
    assert infer_auto_device_map(model, {0: 21 * MIB}, dtype=torch.float16, special_dtypes=special) == {"": 0}
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_special_dtypes_leave_ties_ties() -> None:
    model = empty(width=1024, blocks=1)
    weight = model.embed.weight.nbytes  # shared with the head
    rest = sum(p.nbytes for p in model.parameters()) - weight
    device_map = infer_auto_device_map(
        model, {0: 2 * weight + rest + 100_000}, special_dtypes={"head.weight": torch.float64}
    )
    assert device_map == {"": 0}


@pytest.mark.parametrize("dtype", ["float17", "nn", 16])
def test_what_is_no_dtype_is_named(dtype: Any) -> None:
    with pytest.raises(PlanError, match=str(dtype)):
        infer_auto_device_map(linears(1), {0: "1GB"}, dtype=dtype)


def test_verbose_shows_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(linears(8), {0: 17 * MIB}, verbose=True)
    assert "disk" in capsys.readouterr().out
    infer_auto_device_map(linears(8), {0: 17 * MIB})
    assert capsys.readouterr().out == ""


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(4) for _ in range(count))
        self.gate = nn.Linear(4, count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def calls_to_plan(layers: int) -> int:
    """How many Python functions are called to make a map. Unlike seconds, it is the same each time."""
    with init_empty_weights():
        model = nn.Sequential(*[Experts(16) for _ in range(layers)])
    size = sum(256 * -(-parameter.nbytes // 256) for parameter in model.parameters())
    count = 0

    def count_calls(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(count_calls)
    try:
        infer_auto_device_map(model, {0: size // 2, "cpu": size // 4}, no_split_module_classes=["Experts"])
    finally:
        sys.setprofile(before)
    return count


def test_planning_is_linear_in_the_number_of_modules() -> None:
    assert calls_to_plan(32) < 2.3 * calls_to_plan(16)


# ---------------------------------------------------------------- maps that are given


def test_names_that_the_model_does_not_have_are_warned_about() -> None:
    """Maps are made for a model with another head."""
    with pytest.warns(UserWarning, match=r"'lm_head'.*'head'"):
        plan = plan_by_map(empty(), {"": "disk", "lm_head": "cpu"})
    assert plan.disk_bytes > 0


def test_what_is_no_place_is_named() -> None:
    for value in ("gpu", "meta", -1, None):
        with pytest.raises(BudgetError, match="device_map"):
            plan_by_map(empty(), {"": value})  # type: ignore[dict-item]


def test_the_main_device_computes() -> None:
    plan = plan_by_map(empty(), {"": "cpu"}, main_device="cuda:1")
    assert plan.device == torch.device("cuda:1")
    assert plan.cpu_bytes > 0
    assert plan_by_map(empty(), {"embed": 1, "": "cpu"}).device == torch.device("cuda:1")
    assert plan_by_map(empty(), {"": "cpu"}).device == torch.device("cpu")


def test_the_window_leaves_room_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's maps fill a device up to the size of the largest layer."""
    model = empty(blocks=12, width=256)
    ample = plan_by_map(model, {"": "disk"})
    monkeypatch.setattr("overspill.compat.accelerate.planning.free_memory", lambda device: ample.window)
    modest = plan_by_map(model, {"": "disk"})
    assert modest.window <= ample.window // 2
    monkeypatch.setattr("overspill.compat.accelerate.planning.free_memory", lambda device: 0)
    least = plan_by_map(model, {"": "disk"})
    assert 0 < least.window < modest.window
