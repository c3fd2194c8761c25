import gc
import random
import re
import time
import timeit
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import overspill
from overspill import devices
from overspill.config import GIB, MIB
from overspill.errors import BudgetError, PlanError, SaveError
from overspill.plan import Plan, Rates, Tier
from overspill.planner import Budget, make_plan, plan_within, read_budget
from overspill.tensors import tensor_groups
from overspill.units import Cut, Cutter, Unit, root_needs
from overspill.windows import least_window

CPU, GPU, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


class Machine:
    """Devices that are not there: what the planner may ask of them, and whether it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *present: torch.device) -> None:
        self.free = {CPU: 100 * GIB, **dict.fromkeys(present, 40 * GIB)}
        self.total = {CPU: 128 * GIB, **dict.fromkeys(present, 80 * GIB)}
        self.asked: list[str] = []
        monkeypatch.setattr(devices, "accelerators", lambda: list(present))
        monkeypatch.setattr(devices, "free_memory", self._answer("free", self.free.__getitem__))
        monkeypatch.setattr(devices, "total_memory", self._answer("total", self.total.__getitem__))
        monkeypatch.setattr(devices, "link_rate", self._answer("link", lambda device: 50e9))

    def _answer(self, question: str, answer: Callable[[torch.device], float]) -> Callable[[torch.device], float]:
        def ask(device: torch.device) -> float:
            self.asked.append(question)
            return answer(device)

        return ask


@pytest.fixture
def no_gpu(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture
def two_gpus(monkeypatch):
    return Machine(monkeypatch, GPU, SECOND)


def unit(name: str, nbytes: int, *, compute: float = 1.0, roots: tuple[str, ...] | None = None) -> Unit:
    return Unit(
        name=name, roots=(name,) if roots is None else roots, tensors=(f"{name}.w",), nbytes=nbytes, compute=compute
    )


def whole(*units: Unit, stays: int = 0) -> Cut:
    return Cut(units=units, stays=("small",) if stays else (), stays_nbytes=stays)


def planned(found: Cut, device: int, cpu: int = 0, *, window: int | None = None, second: int = 0) -> Plan:
    capacity = {GPU: device} | ({SECOND: second} if second else {}) | {CPU: cpu}
    budget = Budget(device=GPU, capacity=capacity)
    return plan_within(budget, lambda limit: found, window=window, rates=Rates.assumed(GPU))


def blocks(count: int, nbytes: int = 1024) -> list[Unit]:
    return [unit(f"blocks.{index}", nbytes) for index in range(count)]


def on(plan: Plan, tier: Tier) -> list[str]:
    return [placement.unit.name for placement in plan.placements if placement.tier is tier]


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


def model_of_blocks(count: int = 8, width: int = 32) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block(width) for _ in range(count)))


# What is resident, and what is streamed.


def test_what_fits_is_resident_and_needs_no_window():
    plan = planned(whole(*blocks(4), stays=256), 4 * 1024 + 256)
    assert on(plan, Tier.DEVICE) == [f"blocks.{index}" for index in range(4)]
    assert plan.windows == {}
    assert plan.streamed_bytes == 0


def test_one_byte_less_and_there_is_a_window():
    plan = planned(whole(*blocks(8), stays=256), 8 * 1024 + 255, cpu=10**6)
    assert len(on(plan, Tier.CPU)) == 4
    assert plan.windows == {GPU: 3 * 1024}


def test_the_streamed_units_lie_evenly_in_the_pass():
    plan = planned(whole(*blocks(32)), 19 * 1024, cpu=10**6)
    streamed = [index for index, p in enumerate(plan.placements) if p.tier is not Tier.DEVICE]
    assert len(streamed) == 16
    assert {later - earlier for earlier, later in pairwise(streamed)} == {2}


def test_even_means_by_compute_not_by_number():
    slow, fast = blocks(16), [unit(f"fast.{index}", 1024, compute=0.25) for index in range(16)]
    plan = planned(whole(*slow, *fast), 23 * 1024, cpu=10**6)
    streamed = on(plan, Tier.CPU)
    assert len(streamed) == 12
    assert sum(name.startswith("blocks") for name in streamed) in (9, 10), "four fifths of the compute is theirs"


def test_units_of_two_sizes_are_streamed_in_like_parts():
    halves = [*blocks(16), *(unit(f"large.{index}", 2048) for index in range(16))]
    plan = planned(whole(*halves), 16 * 1024 + 8 * 1024, cpu=10**6)
    streamed = on(plan, Tier.CPU)
    assert 5 <= sum(name.startswith("blocks") for name in streamed) <= 13
    assert 5 <= sum(name.startswith("large") for name in streamed) <= 13


def test_the_disk_gets_what_the_cpu_cannot_hold_spread_among_the_streamed():
    plan = planned(whole(*blocks(32)), 3 * 1024, cpu=24 * 1024)
    on_disk = [index for index, p in enumerate(plan.placements) if p.tier is Tier.DISK]
    assert len(on_disk) == 8
    assert {later - earlier for earlier, later in pairwise(on_disk)} == {4}


def test_no_streamed_unit_would_fit_in_what_is_left():
    found = whole(unit("a", 3072), *blocks(6), unit("b", 512), unit("c", 512))
    plan = planned(found, 6 * 1024, cpu=4 * 1024)
    left = 4 * 1024 - plan.cpu_bytes
    assert all(p.unit.nbytes > left for p in plan.placements if p.tier is Tier.DISK)


def test_large_units_are_resident_so_that_the_window_stays_small():
    found = whole(unit("embed", 10_240), *blocks(16), unit("head", 10_240))
    plan = planned(found, 2 * 10_240 + 3 * 1024, cpu=10**6)
    assert on(plan, Tier.DEVICE) == ["embed", "head"]
    assert plan.window == 3 * 1024


@pytest.mark.parametrize("spare", [0, 256])
def test_large_units_are_resident_even_beside_a_window_two_units_deep(spare):
    found = whole(unit("embed", 10_240), *blocks(16), unit("head", 10_240))
    plan = planned(found, 2 * 10_240 + 2 * 1024 + spare, cpu=10**6)
    assert on(plan, Tier.DEVICE) == ["embed", "head"]
    assert plan.window == 2 * 1024 + spare


def test_large_units_are_not_resident_beside_a_window_less_than_two_units_deep():
    found = whole(unit("embed", 10_240), *blocks(16), unit("head", 10_240))
    plan = planned(found, 2 * 10_240 + 2 * 1024 - 256, cpu=10**6)
    assert on(plan, Tier.DEVICE) == []


def test_large_units_are_streamed_where_they_cannot_be_resident():
    found = whole(unit("embed", 10_240), *blocks(16), unit("head", 10_240))
    plan = planned(found, 10_240, cpu=10**6)
    assert on(plan, Tier.DEVICE) == []
    assert plan.window == 10_240


def test_a_tensor_that_is_read_in_place_is_resident_first():
    table = unit("table", 1024, roots=())
    plan = planned(whole(*blocks(16), table), 4 * 1024, cpu=10**6)
    assert on(plan, Tier.DEVICE) == ["table"]


def test_a_window_for_two_units_comes_before_what_is_read_in_place():
    table = unit("table", 256, roots=())
    plan = planned(whole(*blocks(16), table), 2 * 1024 - 256, cpu=10**6)
    assert on(plan, Tier.DEVICE) == []
    assert plan.window == 2 * 1024 - 256


def test_two_blocks_fit_beside_resident_units_also_where_a_tensor_that_is_read_in_place_parts_them():
    first, table, second = unit("first", 14 * 256), unit("table", 3 * 256, roots=()), unit("second", 16 * 256)
    plan = planned(whole(first, table, second, unit("third", 8 * 256), unit("large", 15 * 256, roots=())), 39 * 256)
    assert plan.window >= first.nbytes + second.nbytes


def test_the_window_holds_all_that_one_module_needs():
    shared = unit("shared", 4096, roots=("blocks.0", "blocks.5"))
    plan = planned(whole(shared, *blocks(8)), 5 * 1024, cpu=10**6)
    streamed = [p.unit for p in plan.placements if p.tier is not Tier.DEVICE]
    assert plan.window >= least_window(streamed)
    with pytest.raises(BudgetError, match="5120 bytes"):
        planned(whole(shared, *blocks(8)), 5 * 1024 - 1, cpu=10**6)


def test_a_device_that_is_given_nothing_still_gets_a_window():
    plan = planned(whole(*blocks(8), stays=256), 0)
    assert on(plan, Tier.DISK) == [f"blocks.{index}" for index in range(8)]
    assert plan.window == 5 * 1024
    assert "beyond max_memory, which gives cuda:0 nothing" in str(plan)


def test_where_the_cpu_computes_units_are_resident_or_on_disk():
    budget = Budget(device=CPU, capacity={CPU: 6 * 1024})
    plan = plan_within(budget, lambda limit: whole(*blocks(8)), rates=Rates.assumed(CPU))
    assert plan.cpu_bytes == 0
    assert (len(on(plan, Tier.DEVICE)), len(on(plan, Tier.DISK))) == (3, 5)
    assert plan.bytes_on(CPU) == 6 * 1024


# A given window.


@pytest.mark.parametrize("device", [0, 6 * 1024])
def test_a_given_window_is_kept_and_the_rest_is_resident(device):
    plan = planned(whole(*blocks(8)), device, window=1024)
    assert plan.window == 1024
    assert len(on(plan, Tier.DEVICE)) == max(0, device - 1024) // 1024


def test_what_is_too_large_for_a_given_window_is_resident():
    plan = planned(whole(*blocks(8), unit("head", 4096)), 6 * 1024, cpu=10**6, window=1024)
    assert "head" in on(plan, Tier.DEVICE)
    assert plan.window == 1024


@pytest.mark.parametrize(
    "large",
    [
        [unit("table", 1536, roots=())],
        [unit("left", 768, roots=("both", "alone")), unit("right", 768, roots=("both", "other"))],
    ],
    ids=["read in place", "needed at once"],
)
def test_what_a_given_window_cannot_take_is_resident_to_the_byte(large):
    plan = planned(whole(*blocks(8), *large), 1024 + 1536, window=1024)
    assert on(plan, Tier.DEVICE) == [unit.name for unit in large]
    assert plan.window == 1024
    with pytest.raises(BudgetError):
        planned(whole(*blocks(8), *large), 1024 + 1535, window=1024)


def test_a_given_window_that_nothing_fits_says_how_much_would():
    with pytest.raises(BudgetError, match=r"window=512 is 512 bytes too small: blocks\.0 .* 1024 bytes or more"):
        planned(whole(*blocks(8)), 0, window=512)


def test_a_given_window_that_is_large_enough_is_not_what_is_too_small():
    with pytest.raises(BudgetError, match=r"512 B on cuda:0 is 512 bytes too little: it must hold a window of 1\.00"):
        planned(whole(*blocks(8)), 512, window=1024)


def test_a_given_window_larger_than_the_budget_is_an_error():
    with pytest.raises(BudgetError, match=r"2\.00 KiB on cuda:0 is 1024 bytes too little.*Give cuda:0 3072 bytes"):
        planned(whole(*blocks(8)), 2048, window=3072)


def test_a_given_window_is_an_error_when_nothing_streams():
    with pytest.raises(PlanError, match="no effect"):
        planned(whole(*blocks(2)), 4096, window=1024)


# Budgets too small for a block, or for anything.


def test_blocks_that_do_not_fit_are_cut_into_their_children(no_gpu):
    model = model_of_blocks()
    block = Cutter(model)(None).units[0].nbytes
    plan = make_plan(model, {0: block - 1, "cpu": "1GiB"}, device="cuda:0")
    assert {placement.unit.name for placement in plan.placements} >= {"0.up", "0.down"}
    assert plan.bytes_on(GPU) <= block - 1


def test_blocks_that_do_fit_stay_whole_where_others_are_cut(no_gpu):
    with torch.device("meta"):
        model = nn.Sequential(Block(64), Block(8), Block(8))
    large = Cutter(model)(None).units[0].nbytes
    plan = make_plan(model, {0: large - 1, "cpu": "1GiB"}, device="cuda:0")
    assert {"0.up", "0.down", "1", "2"} <= {placement.unit.name for placement in plan.placements}


def test_where_a_block_is_cut_all_the_room_is_window():
    coarse, fine = whole(*blocks(8, nbytes=12 * 1024)), whole(*blocks(96))
    budget = Budget(device=GPU, capacity={GPU: 11 * 1024, CPU: 10**6})
    plan = plan_within(budget, lambda limit: coarse if limit is None else fine, rates=Rates.assumed(GPU))
    assert plan.window == 11 * 1024
    assert on(plan, Tier.DEVICE) == []


def test_a_window_smaller_than_a_block_cuts_it(no_gpu):
    model = model_of_blocks()
    block = Cutter(model)(None).units[0].nbytes
    plan = make_plan(model, {"cpu": "1GiB"}, device="cuda:0", window=block - 1)
    assert plan.window <= block - 1
    assert max(root_needs(placement.unit for placement in plan.placements).values()) <= plan.window


def test_a_budget_that_is_too_small_says_by_how_much_and_what_would_fit(no_gpu):
    model = model_of_blocks()
    with pytest.raises(BudgetError, match="bytes too little") as error:
        make_plan(model, {0: 300}, device="cuda:0")
    said = re.search(r"Give cuda:0 (\d+) bytes", str(error.value))
    assert said is not None
    enough = int(said[1])
    assert f"is {enough - 300} bytes too little" in str(error.value)
    assert make_plan(model, {0: enough}, device="cuda:0").bytes_on(GPU) <= enough
    with pytest.raises(BudgetError):
        make_plan(model, {0: enough - 1}, device="cuda:0")


def test_a_budget_below_what_stays_is_an_error():
    with pytest.raises(BudgetError, match="Give cuda:0 512 bytes"):
        planned(whole(stays=512), 511)


# Several accelerators.


@pytest.mark.parametrize("on_the_first", [3, 5])
def test_what_fits_on_several_devices_is_on_each_in_one_range(on_the_first):
    plan = planned(whole(*blocks(8)), on_the_first * 1024, second=(8 - on_the_first) * 1024)
    assert [placement.device for placement in plan.placements] == [GPU] * on_the_first + [SECOND] * (8 - on_the_first)
    assert plan.streamed_bytes == 0


def test_the_first_device_is_filled_before_the_next():
    plan = planned(whole(*blocks(8)), 6 * 1024, second=6 * 1024)
    assert [placement.device for placement in plan.placements] == [GPU] * 6 + [SECOND] * 2


def test_the_first_device_keeps_room_for_what_cannot_leave_it():
    shared = unit("shared", 1024, roots=("blocks.0", "blocks.7"))
    plan = planned(whole(shared, *blocks(8)), 5 * 1024, second=6 * 1024)
    assert [placement.device for placement in plan.placements] == [GPU] * 4 + [SECOND] * 4 + [GPU]
    assert plan.windows == {}
    plan = planned(whole(shared, *blocks(8)), 3 * 1024 - 1, cpu=10**6, second=6 * 1024)
    assert plan.windows != {}
    assert plan.bytes_on(GPU) < 3 * 1024


def test_each_device_has_room_for_what_stays_with_the_units():
    plan = planned(whole(*blocks(8), stays=512), 5 * 1024 + 512, second=3 * 1024 + 512)
    assert [placement.device for placement in plan.placements] == [GPU] * 5 + [SECOND] * 3
    plan = planned(whole(*blocks(8), stays=512), 5 * 1024 + 512, cpu=10**6, second=3 * 1024)
    assert [placement.device for placement in plan.placements] == [GPU] * 6 + [SECOND] * 2


def test_what_does_not_fit_on_several_devices_is_streamed_through_the_first():
    plan = planned(whole(*blocks(16)), 6 * 1024, cpu=10**6, second=4 * 1024)
    assert [placement.device for placement in plan.placements] == [GPU] * 12 + [SECOND] * 4
    assert set(plan.windows) == {GPU}
    assert all(placement.device == GPU for placement in plan.placements if placement.tier is Tier.CPU)
    assert plan.bytes_on(GPU) <= 6 * 1024
    assert plan.bytes_on(SECOND) <= 4 * 1024


def test_units_that_one_module_needs_are_on_one_device():
    shared = unit("shared", 1024, roots=("blocks.0", "blocks.7"))
    plan = planned(whole(shared, *blocks(8)), 8 * 1024, second=8 * 1024)
    where = {placement.unit.name: placement.device for placement in plan.placements}
    assert where["shared"] == where["blocks.0"] == where["blocks.7"] == GPU


def test_a_unit_that_only_one_of_its_modules_shares_does_not_leave_it_either():
    shared = unit("shared", 1024, roots=("shared", "blocks.0"))
    plan = planned(whole(*blocks(7), shared), 5 * 1024, second=3 * 1024)
    where = {placement.unit.name: placement.device for placement in plan.placements}
    assert where["shared"] == where["blocks.0"] == GPU


# What the user writes.


def test_sizes_and_devices_are_written_as_in_accelerate(two_gpus):
    budget = read_budget({0: "10GiB", "cuda:1": 5 * GIB, "cpu": "30GB", "disk": None})  # type: ignore[dict-item]
    assert budget.device == GPU
    assert budget.capacity == {GPU: 10 * GIB, SECOND: 5 * GIB, CPU: 30 * 10**9}


def test_a_plan_needs_no_device_and_asks_none_when_all_is_given(no_gpu):
    plan = make_plan(model_of_blocks(), {0: "1GiB", "cpu": "1GiB"}, device="cuda:0")
    assert plan.device == GPU
    assert no_gpu.asked == []


def test_the_callers_budget_is_left_as_it_was(no_gpu):
    mine: dict[int | str, int | str] = {0: "100KB", "cpu": "1MB"}
    make_plan(model_of_blocks(), mine, device="cuda:0", headroom="1KB")
    assert mine == {0: "100KB", "cpu": "1MB"}


def test_an_empty_budget_puts_everything_on_disk(no_gpu):
    plan = make_plan(model_of_blocks(), {})
    assert plan.device == CPU
    assert plan.disk_bytes > 0
    assert plan.resident_bytes == plan.cpu_bytes == 0


def test_without_a_budget_it_is_what_is_free_less_headroom(two_gpus):
    budget = read_budget()
    assert budget.device == GPU
    assert budget.capacity == {GPU: 32 * GIB, SECOND: 32 * GIB, CPU: 100 * GIB - 128 * GIB // 10}
    assert budget.headroom[GPU] == 8 * GIB


def test_without_a_budget_a_named_device_computes_alone(two_gpus):
    assert list(read_budget(device=1).capacity) == [SECOND, CPU]


def test_given_headroom_takes_the_place_of_the_usual_one(two_gpus):
    budget = read_budget(headroom="2GiB", device=0)
    assert budget.capacity[GPU] == 38 * GIB
    assert budget.headroom[CPU] == 128 * GIB // 10


def test_given_headroom_is_taken_off_a_given_budget(two_gpus):
    budget = read_budget({0: "10GiB", "cpu": "8GiB"}, headroom="2GiB")
    assert budget.capacity == {GPU: 8 * GIB, CPU: 8 * GIB}
    assert budget.headroom == {GPU: 2 * GIB}


def test_a_cache_is_kept_free_beside_the_headroom(two_gpus):
    budget = read_budget({0: "10GiB", 1: "7GiB", "cpu": "8GiB"}, headroom="2GiB", cache=3 * GIB)
    assert budget.capacity == {GPU: 5 * GIB, SECOND: 2 * GIB, CPU: 8 * GIB}
    assert budget.headroom == {GPU: 5 * GIB, SECOND: 5 * GIB}
    assert read_budget({0: "10GiB"}, cache=3 * GIB).capacity[GPU] == 7 * GIB
    with pytest.raises(BudgetError, match=r"headroom of 5\.00 GiB, with that for the cache, leaves nothing"):
        read_budget({0: "5GiB"}, headroom="2GiB", cache=3 * GIB)


def test_without_a_budget_a_cache_is_kept_free_wherever_the_model_computes(two_gpus):
    budget = read_budget(cache=3 * GIB)
    assert budget.capacity == {GPU: 29 * GIB, SECOND: 29 * GIB, CPU: 100 * GIB - 128 * GIB // 10}
    assert budget.headroom == {GPU: 11 * GIB, SECOND: 11 * GIB, CPU: 128 * GIB // 10}


def test_where_the_cpu_computes_headroom_is_taken_off_its_budget(no_gpu):
    assert read_budget({"cpu": "8GiB"}, headroom="2GiB").capacity == {CPU: 6 * GIB}


def test_a_full_device_is_an_error(two_gpus):
    two_gpus.free[GPU] = MIB
    with pytest.raises(BudgetError, match=r"cuda:0 has 1\.00 MiB free, and 8\.00 GiB of headroom"):
        read_budget()


def test_the_budgets_first_accelerator_computes(two_gpus):
    assert read_budget({1: "1GiB"}).device == SECOND
    assert read_budget({"cpu": "1GiB"}).device == GPU
    assert read_budget({1: "1GiB", 0: "1GiB"}).device == GPU
    assert read_budget({1: "1GiB"}, device=0).device == GPU


@pytest.mark.parametrize(
    ("max_memory", "options", "message"),
    [
        ({"gpu": 1}, {}, r"max_memory\['gpu'\]: 'gpu' is no device.*'cuda:0', 'cuda:1', 'cpu', 'disk'"),
        ({-1: 1}, {}, "-1 is no device"),
        ({True: 1}, {}, "True is no device"),
        ({"meta": 1}, {}, "'meta' is no device"),
        ({7: 1}, {}, "names cuda:7, and there is none: here are cuda:0, cuda:1, cpu, disk"),
        ({7: 1}, {"device": 0}, "names cuda:7, and there is none"),
        ({0: "much"}, {}, r"max_memory\[0\] 'much' is not a size"),
        ("10GiB", {}, "max_memory='10GiB' does not say of which device"),
        ({0: -1}, {}, r"max_memory\[0\] is negative"),
        ({0: 1, "cuda:0": 2}, {}, "names cuda:0 a second time"),
        ({"disk": "1GiB"}, {}, "disk has no limit"),
        ({0: 1}, {"device": "cpu"}, "the model computes on the CPU"),
        ({0: 1}, {"device": "disk"}, "nothing computes on a disk"),
        ({0: 1}, {"device": "gpu"}, "device: 'gpu' is no device"),
        ({0: 1}, {"headroom": "x"}, "headroom 'x' is not a size"),
        ({0: "1GiB"}, {"headroom": "1GiB"}, r"leaves nothing of the 1\.00 GiB for cuda:0"),
        ({"cpu": "1GiB"}, {"headroom": "1GiB"}, "headroom='1GiB' has no effect"),
        (None, {"device": 7}, "no device 7"),
    ],
)
def test_a_budget_that_makes_no_sense_is_an_error_that_names_it(two_gpus, max_memory, options, message):
    with pytest.raises(BudgetError, match=message):
        read_budget(max_memory, **options)


def test_an_accelerator_in_the_budget_of_a_machine_without_one_is_an_error(no_gpu):
    with pytest.raises(BudgetError, match=r"names cuda:0.*pass device='cuda:0' too"):
        read_budget({0: "1GiB"})


def test_keys_that_went_through_json_are_read(two_gpus):
    assert read_budget({"0": "1GiB"}).capacity[GPU] == GIB


def test_the_link_is_measured_only_if_something_crosses_it(two_gpus):
    model = model_of_blocks()
    assert not make_plan(model, {0: "1GiB"}).rates.link_measured
    assert "link" not in two_gpus.asked
    rates = make_plan(model, {0: "100KB"}).rates
    assert (rates.link, rates.link_measured, rates.disk_measured) == (50e9, True, False)


# Whatever the sizes.


@st.composite
def cuts(draw):
    """Units of many or few sizes, some read in place, some shared by two modules."""
    sizes = st.sampled_from([256, 1024, 4096]) if draw(st.booleans()) else st.integers(1, 40).map(lambda n: 256 * n)
    units = []
    for index in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(["block"] * 6 + ["place", "shared"]))
        roots = {"block": (f"u{index}",), "place": (), "shared": (f"u{index}", f"u{index // 2}")}[kind]
        units.append(unit(f"u{index}", draw(sizes), compute=draw(st.sampled_from([0.0, 1.0, 5.0])), roots=roots))
    return whole(*units, stays=draw(st.sampled_from([0, 256])))


def planned_or_none(found: Cut, device: int, cpu: int, window: int | None = None) -> Plan | None:
    try:
        return planned(found, device, cpu, window=window)
    except (BudgetError, PlanError):
        return None


def offloaded(plan: Plan) -> int:
    """Bytes that are not resident. A pass moves these, less what the window happens to keep."""
    return plan.cpu_bytes + plan.disk_bytes


bytes_of = st.integers(1, 400).map(lambda n: 128 * n)


@given(found=cuts(), device=bytes_of, cpu=bytes_of, second=st.none() | bytes_of, window=st.none() | bytes_of)
def test_no_budget_is_ever_exceeded_and_each_unit_is_placed_once(found, device, cpu, second, window):
    window = window and window // 256 * 256
    try:
        plan = planned(found, device, cpu, window=window, second=second or 0)
    except (BudgetError, PlanError):
        return
    assert plan.bytes_on(GPU) <= device
    assert plan.bytes_on(SECOND) <= (second or 0)
    assert plan.cpu_bytes <= cpu
    assert tuple(placement.unit for placement in plan.placements) == found.units
    streamed = [placement.unit for placement in plan.placements if placement.tier is not Tier.DEVICE]
    assert least_window(streamed) <= plan.window
    assert bool(streamed) == bool(plan.window)
    device_of: dict[str, torch.device] = {}
    for placement in plan.placements:
        for root in placement.unit.roots:
            assert device_of.setdefault(root, placement.device) == placement.device


@given(found=cuts(), device=bytes_of, more=bytes_of, window=st.none() | bytes_of)
def test_more_memory_never_offloads_more(found, device, more, window):
    window = window and window // 256 * 256
    less, plan = (planned_or_none(found, size, 0, window) for size in (device, device + more))
    if less is not None:
        everything_fits = sum(unit.nbytes for unit in found.units) + found.stays_nbytes <= device + more
        assert plan is not None or (everything_fits and window is not None)
        assert plan is None or offloaded(plan) <= offloaded(less)


@pytest.mark.parametrize("sizes", [[10, 1, 1, 10, 1, 1, 3], [10, 1, 1, 10, 1, 1, 7, 1, 1]], ids=["small", "alike"])
def test_more_memory_never_offloads_more_where_tensors_that_are_read_in_place_part_the_blocks(sizes):
    """Those have the size 1. Once they are resident, the large blocks are neighbours, and need a larger window."""
    found = whole(*(unit(f"u{index}", 256 * n, roots=() if n == 1 else None) for index, n in enumerate(sizes)))
    plans = [planned_or_none(found, 256 * n, 0) for n in range(sum(sizes) + 1)]
    left_out = [offloaded(plan) for plan in plans if plan is not None]
    assert left_out[-1] == 0
    assert left_out == sorted(left_out, reverse=True)


@given(found=cuts(), device=bytes_of, cpu=bytes_of, more=bytes_of)
def test_more_host_memory_never_leaves_more_on_disk(found, device, cpu, more):
    less, plan = (planned_or_none(found, device, size) for size in (cpu, cpu + more))
    if less is not None:
        assert plan is not None
        assert plan.disk_bytes <= less.disk_bytes


@given(found=cuts(), device=bytes_of, cpu=bytes_of)
def test_the_same_question_has_the_same_answer(found, device, cpu):
    assert planned_or_none(found, device, cpu) == planned_or_none(found, device, cpu)


@given(data=st.data())
def test_more_memory_never_offloads_more_however_small_it_is_for_the_blocks(data):
    with torch.device("meta"):
        model: Any = nn.Sequential(*(Block(data.draw(st.sampled_from([8, 16, 32]))) for _ in range(4)))
    if data.draw(st.booleans()):
        model[2].up.weight = model[2].down.weight
    cut_within = Cutter(model)
    total = sum(unit.nbytes for unit in cut_within(None).units)
    left_out: list[int] = []
    for device in sorted(data.draw(st.lists(st.integers(256, total), min_size=2, max_size=6))):
        try:
            budget = Budget(device=GPU, capacity={GPU: device, CPU: 0})
            plan = plan_within(budget, cut_within, rates=Rates.assumed(GPU))
        except BudgetError:
            assert left_out == [], "what a smaller budget can do, a larger one can"
            continue
        plan.check(tensor_groups(model))
        assert plan.bytes_on(GPU) <= device
        left_out.append(offloaded(plan) + plan.stays_nbytes)
    assert left_out == sorted(left_out, reverse=True)


def test_planning_takes_time_in_proportion_to_the_units():
    sizes = random.Random(0)

    def seconds(count: int) -> float:
        found = whole(*(unit(f"u.{index}", 256 * sizes.randint(1, 400)) for index in range(count)))
        gc.collect()
        gc.disable()  # it would look through all that other tests have left
        try:
            return min(
                timeit.repeat(
                    lambda: planned(found, 256 * 50 * count, cpu=256 * 20 * count),
                    timer=time.process_time,
                    number=1,
                    repeat=3,
                )
            )
        finally:
            gc.enable()

    seconds(200)
    assert seconds(8000) < 32 * seconds(1000), "eight times the units; a quadratic plan would take 64 times as long"


class Quantized(torch.Tensor):
    """A tensor around others, as quantization libraries make them."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Quantized":
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __tensor_flatten__(self):
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Quantized(inner["values"])

    def __repr__(self):  # type: ignore[override]  # torch's reads values
        return "Quantized()"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return Quantized(args[0].values)
        raise NotImplementedError(function)


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model[1].weight = nn.Parameter(Quantized(torch.zeros(512, 512, dtype=torch.int8)), requires_grad=False)
    return model


def test_a_tensor_around_others_is_refused_by_name_when_it_would_be_offloaded():
    with pytest.raises(PlanError, match=r"1\.weight is a Quantized.*resident"):
        overspill.plan(quantized(), {"cpu": "1100KiB"})


def test_a_tensor_around_others_can_be_resident():
    assert overspill.plan(quantized(), {"cpu": "1GiB"}).streamed_bytes == 0


def test_a_tensor_around_others_is_refused_by_name_when_it_is_to_be_saved(tmp_path):
    with pytest.raises(SaveError, match=r"1\.weight is a Quantized"):
        overspill.save(quantized(), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
