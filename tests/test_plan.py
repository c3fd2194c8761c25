import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from overspill import devices
from overspill.errors import BudgetError, PlanError
from overspill.plan import Placement, Plan, Rates, Tier
from overspill.planner import make_plan
from overspill.tensors import tensor_groups
from overspill.units import Unit, cut

CPU, GPU, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
LARGE = 1024  # a square float32 matrix of this width takes 4 MiB


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    monkeypatch.setattr(devices, "accelerators", list)
    with torch.device("meta"):
        yield


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up: Any = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x))) + self.shift


class Net(nn.Module):
    def __init__(self, blocks: int = 8, width: int = 32, *, vocabulary: int = 16384, tied: bool = False) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(width))
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def tiers(plan: Plan) -> dict[str, tuple[Tier, torch.device]]:
    return {placement.unit.name: (placement.tier, placement.device) for placement in plan.placements}


def test_bytes_are_summed_by_tier():
    plan = make_plan(Net(), {0: "3MB", "cpu": "100KB"}, device="cuda:0")
    total = sum(placement.unit.nbytes for placement in plan.placements)
    assert plan.resident_bytes + plan.cpu_bytes + plan.disk_bytes == total
    assert plan.streamed_bytes == plan.cpu_bytes + plan.disk_bytes
    assert plan.bytes_on(GPU) == plan.resident_bytes + plan.window + plan.stays_nbytes
    assert plan.bytes_on(CPU) == plan.cpu_bytes


def streaming(*placements: tuple[Tier, int], rates: Rates, device: torch.device = GPU) -> Plan:
    units = [Unit(name=str(i), roots=(str(i),), tensors=(), nbytes=n, compute=1) for i, (_, n) in enumerate(placements)]
    return Plan(
        placements=tuple(
            Placement(unit=unit, tier=tier, device=device) for unit, (tier, _) in zip(units, placements, strict=True)
        ),
        stays=(),
        stays_nbytes=0,
        device=device,
        windows={device: 1},
        budgets={},
        headroom={},
        rates=rates,
        dtype=None,
    )


def test_the_predicted_time_is_that_of_the_slower_way():
    rates = Rates(link=100, disk=10)
    assert streaming((Tier.CPU, 1000), (Tier.DEVICE, 5000), rates=rates).predicted_seconds == 10
    assert streaming((Tier.CPU, 1000), (Tier.DISK, 500), rates=rates).predicted_seconds == 50
    assert streaming((Tier.DISK, 500), rates=Rates(link=None, disk=10), device=CPU).predicted_seconds == 50
    assert streaming((Tier.DEVICE, 500), rates=rates).predicted_seconds == 0


def test_a_plan_survives_pickling():
    plan = make_plan(Net(), {0: "3MB"}, device="cuda:0")
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_small_tensors_compute_where_the_unit_around_them_does():
    model = Net(blocks=2)
    plan = Plan.from_device_map(model, {"": 0, "blocks.1": 1})
    assert plan.device_of("blocks.1.shift") == plan.device_of("blocks.1") == SECOND
    assert plan.device_of("blocks.0.shift") == plan.device_of("norm") == plan.device_of("token") == GPU


def test_a_plan_for_another_model_is_refused():
    plan = make_plan(Net(blocks=2), {0: "3MB"}, device="cuda:0")
    plan.check(tensor_groups(Net(blocks=2)))
    with pytest.raises(PlanError, match=r"says nothing about blocks\.2\.shift, blocks\.2\.norm\.weight"):
        plan.check(tensor_groups(Net(blocks=3)))
    with pytest.raises(PlanError, match=r"places blocks\.1\.down\.bias.*, which the model has not"):
        plan.check(tensor_groups(Net(blocks=1)))
    with pytest.raises(PlanError, match="another size or dtype of 'embed'"):
        plan.check(tensor_groups(Net(blocks=2).half()))


# Accelerate's form, out and in.


def covered_by(name: str, device_map: dict[str, int | str]) -> int | str:
    """Where Accelerate would look for a tensor: the longest prefix of its name."""
    while name not in device_map:
        assert name, "nothing covers it"
        name = name.rpartition(".")[0]
    return device_map[name]


def assert_map_agrees(model: nn.Module, plan: Plan) -> None:
    device_map = plan.device_map
    groups = tensor_groups(model)
    known = {path for path, _ in model.named_modules(remove_duplicate=False)} | set(groups)
    assert set(device_map) <= known
    for placement in plan.placements:
        resident = "cpu" if placement.device == CPU else placement.device.index
        expected = resident if placement.tier is Tier.DEVICE else placement.tier.value
        assert all(covered_by(name, device_map) == expected for name in placement.unit.tensors)
    for name in plan.stays:
        covered_by(name, device_map)


def test_everything_on_one_device_is_one_entry():
    assert make_plan(Net(), {0: "1GiB"}, device="cuda:0").device_map == {"": 0}
    assert make_plan(Net(), {"cpu": "1GiB"}, device="cpu").device_map == {"": "cpu"}


def test_a_device_map_names_units_and_what_stays():
    assert make_plan(Net(blocks=2), {"cpu": "1GiB"}, device="cuda:0").device_map == {
        "embed": "cpu",
        "blocks.0": "cpu",
        "blocks.1": "cpu",
        "head": "cpu",
        "token": 0,
        "blocks.0.shift": 0,
        "blocks.1.shift": 0,
        "norm.weight": 0,
        "norm.bias": 0,
    }


def test_where_the_cpu_computes_resident_units_are_on_the_cpu():
    plan = make_plan(Net(), {"cpu": "3MB"}, device="cpu")
    assert set(plan.device_map.values()) == {"cpu", "disk"}
    assert_map_agrees(Net(), plan)


@given(device=st.integers(0, 5_000_000), cpu=st.integers(0, 3_000_000), tied=st.booleans(), shared=st.booleans())
def test_a_plan_comes_back_from_its_device_map(device, cpu, tied, shared):
    model = Net(tied=tied)
    if shared:
        model.blocks[3].up.weight = model.blocks[1].up.weight
    try:
        plan = make_plan(model, {0: device, "cpu": cpu}, device="cuda:0")
    except BudgetError:
        return
    assert_map_agrees(model, plan)
    if tuple(placement.unit for placement in plan.placements) == cut(model).units:  # blocks were not cut further
        again = Plan.from_device_map(model, plan.device_map, device=0)
        assert tiers(again) == tiers(plan)
        assert again.stays == plan.stays


def test_a_device_map_is_read_by_the_longest_prefix():
    plan = Plan.from_device_map(Net(blocks=3), {"": "disk", "blocks": "cpu", "blocks.1": 0, "head": "cuda:0"})
    assert plan.device == GPU
    assert tiers(plan) == {
        "embed": (Tier.DISK, GPU),
        "blocks.0": (Tier.CPU, GPU),
        "blocks.1": (Tier.DEVICE, GPU),
        "blocks.2": (Tier.CPU, GPU),
        "norm": (Tier.DISK, GPU),
        "head": (Tier.DEVICE, GPU),
    }
    assert plan.stays == ("token", "blocks.0.shift", "blocks.1.shift", "blocks.2.shift")


def test_devices_are_written_as_numbers_names_or_devices():
    for value in (1, "1", "cuda:1", SECOND):
        assert tiers(Plan.from_device_map(Net(), {"": value}))["embed"] == (Tier.DEVICE, SECOND)


def test_without_an_accelerator_the_cpu_computes():
    plan = Plan.from_device_map(Net(), {"": "cpu", "head": "disk"})
    assert plan.device == CPU
    assert tiers(plan)["embed"] == (Tier.DEVICE, CPU)
    assert tiers(plan)["head"] == (Tier.DISK, CPU)
    assert plan.rates.link is None


def test_the_device_can_be_given_beside_the_map():
    plan = Plan.from_device_map(Net(), {"": "cpu"}, device=0)
    assert plan.device == GPU
    assert tiers(plan)["embed"] == (Tier.CPU, GPU)


def test_a_unit_whose_parts_are_in_two_places_is_cut():
    plan = Plan.from_device_map(Net(blocks=2), {"": 0, "blocks.0.up": "cpu", "blocks.1.down.weight": "disk"})
    where = tiers(plan)
    assert where["blocks.0.up"] == (Tier.CPU, GPU)
    assert where["blocks.0.down"] == (Tier.DEVICE, GPU)
    assert {p.unit.tensors: p.tier for p in plan.placements}["blocks.1.down.weight",] is Tier.DISK


def test_a_tied_tensor_goes_where_its_first_name_says():
    plan = Plan.from_device_map(Net(tied=True), {"": 0, "embed": "cpu", "head": "disk"})
    assert tiers(plan)["embed"] == (Tier.CPU, GPU)
    assert "head" not in tiers(plan)


def test_streamed_units_of_a_map_have_the_usual_window_or_the_given_one():
    model = Net()
    where: dict[str, int | str | torch.device] = {"": "cpu", "embed": 0, "head": 0}
    block = next(p.unit.nbytes for p in Plan.from_device_map(model, where).placements if p.unit.name == "blocks.0")
    blocks = sum(p.unit.name.startswith("blocks") for p in Plan.from_device_map(model, where).placements)
    assert Plan.from_device_map(model, where).window == min(5, blocks) * block
    assert Plan.from_device_map(model, where, window=block).window == block
    with pytest.raises(BudgetError, match=rf"window={block - 1} is 1 B too small: blocks\.0.*Give {block} bytes"):
        Plan.from_device_map(model, where, window=block - 1)
    with pytest.raises(PlanError, match="no effect"):
        Plan.from_device_map(model, {"": 0}, window=block)


def test_tensors_that_the_map_leaves_out_are_listed():
    with pytest.raises(PlanError, match=r"says nothing about token, norm\.weight, norm\.bias\. Add them"):
        Plan.from_device_map(Net(), {"embed": 0, "blocks": 0, "head": 0})
    with pytest.raises(PlanError, match=r"and \d+ more"):
        Plan.from_device_map(Net(), {"embed": 0})


def test_small_buffers_that_no_checkpoint_holds_may_be_left_out():
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.empty(8), persistent=False)

    model = Net()
    model.add_module("rotary", Rotary())
    rest: dict[str, int | str | torch.device] = dict.fromkeys(["token", "embed", "blocks", "norm", "head"], 0)
    assert "rotary.frequencies" in Plan.from_device_map(model, rest).stays


def test_a_path_that_the_model_has_not_is_an_error_with_what_is_near():
    with pytest.raises(PlanError, match=r"'block\.1', which the model does not have. It has: blocks\.1"):
        Plan.from_device_map(Net(), {"": 0, "block.1": "cpu"})


def test_a_value_that_is_no_device_is_an_error():
    with pytest.raises(BudgetError, match=r"device_map\['embed'\]: 'gpu' is no device"):
        Plan.from_device_map(Net(), {"": 0, "embed": "gpu"})


def test_a_module_cannot_compute_in_two_places():
    with pytest.raises(PlanError, match=r"'head' compute on both cuda:0 and cuda:1"):
        Plan.from_device_map(nn.ModuleDict({"head": nn.Linear(LARGE, LARGE)}), {"head.weight": 0, "head.bias": 1})


def test_a_map_of_accelerate_is_read():
    import accelerate

    model = Net(blocks=6)
    # It counts on the device being there for integers, and not for names.
    device_map = accelerate.infer_auto_device_map(
        model, max_memory={"cpu": 2_500_000, "disk": 10**9}, no_split_module_classes=["Block"]
    )
    plan = Plan.from_device_map(model, device_map)
    plan.check(tensor_groups(model))
    assert plan.device == CPU
    assert plan.disk_bytes > 0


# The table and the picture.


def test_the_table_folds_alike_blocks_and_says_what_matters():
    plan = make_plan(
        Net(blocks=24), {0: "1.5MB", "cpu": "100KB"}, device="cuda:0", headroom="100KB", dtype=torch.bfloat16
    )
    lines = str(plan).splitlines()
    assert lines[0].startswith("Plan for cuda:0: ")
    assert lines[0].endswith("in 26 units, bfloat16")
    text = "\n".join(lines)
    assert len(lines) < 20
    for said in (
        "embed",
        "blocks.",
        "rests on",
        "small tensors",
        "a window of",
        "97.66 KiB of headroom",
        "a pass moves",
    ):
        assert said in text


def test_the_table_numbers_the_blocks_of_a_row():
    text = str(Plan.from_device_map(Net(blocks=16), {"": 0, "blocks": "cpu", "blocks.3": 0, "blocks.9": 0}))
    assert "blocks.0-2,4-8,10-15 (14)" in text
    assert "blocks.3,9 (2)" in text


def test_a_long_row_of_numbers_is_shortened():
    text = str(Plan.from_device_map(Net(blocks=80), {"": 0, **{f"blocks.{i}": "disk" for i in range(0, 80, 2)}}))
    assert "blocks.0,2,4,6,8,10,12,14,16,18,20,22,24,…,78 (40)" in text


def test_the_table_says_which_rates_were_measured(monkeypatch):
    monkeypatch.setattr(devices, "accelerators", lambda: [GPU])
    monkeypatch.setattr(devices, "link_rate", lambda device: 55.4e9)
    text = str(make_plan(Net(), {}))
    assert "link 55.4 GB/s measured, disk 3 GB/s assumed" in text
    assert "beyond max_memory, which gives cuda:0 nothing" in text


def test_the_table_says_when_nothing_moves():
    assert "a pass moves nothing" in str(make_plan(Net(), {"cpu": "1GiB"}, device="cpu"))


def test_a_model_that_is_one_unit_has_a_name_in_the_table():
    assert "(the model)" in str(make_plan(nn.Linear(LARGE, LARGE), {"cpu": "1GiB"}, device="cpu"))


@pytest.mark.parametrize(
    ("max_memory", "device"),
    [
        ({0: "3MB", 1: "1MB", "cpu": "500KB"}, "cuda:0"),
        ({0: "1GiB"}, "cuda:0"),
        ({}, "cuda:0"),
        ({"cpu": "3MB"}, "cpu"),
    ],
)
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, max_memory, device, ending):
    path = tmp_path / f"plan.{ending}"
    make_plan(Net(), max_memory, device=device).plot(path)
    assert path.stat().st_size > 5000


def test_a_picture_of_a_plan_with_nothing_in_it_is_drawn(tmp_path: Path):
    make_plan(nn.ReLU(), {}, device="cpu").plot(tmp_path / "plan.png")


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'overspill\[plot\]'"):
        make_plan(Net(), {}, device="cpu").plot(tmp_path / "plan.png")
