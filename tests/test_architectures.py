"""Transformers' architectures, each streamed from every tier: the bits are those of the resident model."""

import dataclasses
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from models import ARCHITECTURES, IDS, MASK, Architecture, randomized
from overspill import units
from overspill.checkpoint.index import SourceFile
from overspill.plan import Placement, Plan, Tier
from overspill.store import merged
from overspill.transfer import Piece
from overspill.windows import usual_window
from support import TIERS, aligned, loaded, placed, save_checkpoint, streamed_units


@dataclasses.dataclass(frozen=True)
class Case:
    """An architecture, its weights in a checkpoint, and what the resident model made of its inputs."""

    architecture: Architecture
    checkpoint: Path
    outputs: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    """After it ran."""


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture = request.param
    torch.manual_seed(0)
    reference = aligned(randomized(architecture.build())).eval()
    checkpoint = save_checkpoint(reference, tmp_path_factory.mktemp("checkpoint"))
    return Case(architecture, checkpoint, outputs_of(reference, architecture), reference.state_dict())


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is too small to move: norms, class tokens, biases and buffers are in units of their own."""
    for module in (units, sys.modules[Plan.__module__]):  # `overspill.plan` is the verb
        monkeypatch.setattr(module, "SMALL_TENSOR", 1)


def outputs_of(model: nn.Module, architecture: Architecture) -> dict[str, torch.Tensor]:
    """Every tensor of what a pass returns: hidden states, caches and the outputs of inner models too."""
    with torch.no_grad():
        return dict(tensors_in(model(**architecture.inputs, output_hidden_states=True)))


def tensors_in(value: Any, path: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from tensors_in(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from tensors_in(part, f"{path}[{index}]")
    elif type(value).__module__.startswith("transformers."):  # a cache, and the layers in it
        yield from tensors_in(vars(value), path)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []


def assert_moved(moved: Counter[str], tier: str, model: nn.Module) -> None:
    """What streams came at least once, from the tiers that have it and from no other."""
    streamed = sum(spec.nbytes for unit in streamed_units(model) for spec in unit.store.layout.specs)
    assert moved.total() >= streamed > 0
    assert (moved["cpu"] > 0) == (tier in ("cpu", "mixed"))
    assert (moved["disk"] > 0) == (tier in ("disk", "mixed"))


def in_host_memory(model: nn.Module) -> set[str]:
    """Names of the tensors on the disk tier that have memory for good."""
    stores = [unit.store for unit in streamed_units(model)]
    values = [values for store in stores for values in getattr(store, "_values", ())]
    return {tensor.name for tensor in values if tensor.memory is not None}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What overspill itself warned of: above all, of a window without room for what runs at once."""
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records if record.name.startswith("overspill")]


def tiers(plan: Plan) -> dict[str, str]:
    """Where each tensor rests."""
    resting = {name: placement.tier.value for placement in plan.placements for name in placement.unit.tensors}
    return resting | dict.fromkeys(plan.stays, "stays")


def cut_small(model: nn.Module, plan: Plan) -> Plan:
    """`plan` with every block cut into its children, down to the last: as for a window that is far too small."""
    found = units.cut(model, limit=1)
    return dataclasses.replace(
        plan,
        placements=tuple(Placement(unit=unit, tier=Tier.DISK, device=plan.device) for unit in found.units),
        stays=found.stays,
        stays_nbytes=found.stays_nbytes,
        windows={plan.device: usual_window(found.units)},
    )


def test_every_output_has_the_same_bits_and_the_bytes_really_moved(
    case: Case, tier: str, moved: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(case.architecture.build, case.checkpoint, tier)
    assert len(streamed_units(model)) >= (2 if tier == "mixed" else case.architecture.units)
    assert any("hidden_states[2]" in name for name in case.outputs)
    assert all(value.isfinite().all() for value in case.outputs.values())
    moved.clear()
    for _ in range(2):
        assert_same(outputs_of(model, case.architecture), case.outputs)
    assert_moved(moved, tier, model)
    assert warned(caplog) == []


@pytest.mark.usefixtures("everything_moves")
def test_every_output_has_the_same_bits_where_even_the_smallest_tensor_moves(case: Case, tier: str) -> None:
    model = loaded(case.architecture.build, case.checkpoint, tier)
    for _ in range(2):
        assert_same(outputs_of(model, case.architecture), case.outputs)


@pytest.mark.usefixtures("everything_moves")
@pytest.mark.parametrize("tier", ["disk", "mixed"])
def test_every_output_has_the_same_bits_where_blocks_are_cut_into_their_smallest_parts(
    case: Case, tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    with overspill.empty_weights():
        model = case.architecture.build().eval()
    blocks = overspill.plan(model, {}, device="cpu")
    parts = placed(cut_small(model, blocks), tier)
    assert len(parts.placements) > len(blocks.placements)
    overspill.load(model, case.checkpoint, parts, progress=False)
    for _ in range(2):
        assert_same(outputs_of(model, case.architecture), case.outputs)
    assert warned(caplog) == []


def test_the_state_is_that_of_the_resident_model_after_it_ran(case: Case) -> None:
    model = loaded(case.architecture.build, case.checkpoint, "mixed")
    outputs_of(model, case.architecture)
    assert_same(model.state_dict(), case.state)


def test_a_pass_that_only_reads_weights_on_disk_keeps_none_of_them_in_memory(case: Case) -> None:
    model = loaded(case.architecture.build, case.checkpoint, "disk")
    before = in_host_memory(model)
    outputs_of(model, case.architecture)
    kept = in_host_memory(model) - before
    assert bool(kept) == case.architecture.edits_itself, kept


GENERATES = ["llama", "gpt2", "gemma3", "qwen3-moe", "mamba", "jamba", "t5", "bart"]


@pytest.mark.parametrize(
    "architecture", [architecture for architecture in ARCHITECTURES if architecture.name in GENERATES], ids=str
)
def test_greedy_generation_with_a_cache_gives_the_same_tokens_and_logits(
    architecture: Architecture, moved: Counter[str], tmp_path: Path
) -> None:
    reference = aligned(randomized(architecture.build())).eval()
    model = loaded(architecture.build, save_checkpoint(reference, tmp_path), "mixed")
    moved.clear()
    assert_same(generated_by(model), generated_by(reference))
    assert_moved(moved, "mixed", model)


def generated_by(model: Any) -> dict[str, torch.Tensor]:
    output = model.generate(
        input_ids=IDS,
        attention_mask=MASK,
        do_sample=False,
        use_cache=True,
        min_new_tokens=8,
        max_new_tokens=8,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert len(output.logits) == 8
    return dict(tensors_in(output))


def test_a_plan_that_goes_through_a_device_map_keeps_every_tier(case: Case) -> None:
    with overspill.empty_weights():
        model = case.architecture.build()
    plan = overspill.plan(model, {}, device="cpu")
    again = Plan.from_device_map(model, plan.device_map, device="cpu")
    assert tiers(again) == tiers(plan)


@pytest.mark.parametrize("tier", ["cpu", "mixed"])
def test_a_plan_for_a_gpu_that_goes_through_a_device_map_keeps_every_tier(case: Case, tier: str) -> None:
    with overspill.empty_weights():
        model = case.architecture.build()
    plan = placed(overspill.plan(model, {}, device="cuda:0"), tier)  # planning for a GPU needs none
    again = Plan.from_device_map(model, plan.device_map, device="cuda:0")
    assert tiers(again) == tiers(plan)


@pytest.mark.usefixtures("everything_moves")
def test_a_plan_where_even_the_smallest_tensor_moves_keeps_every_tier_through_a_device_map(case: Case) -> None:
    with overspill.empty_weights():
        model = case.architecture.build()
    plan = placed(overspill.plan(model, {}, device="cuda:0"), "mixed")
    again = Plan.from_device_map(model, plan.device_map, device="cuda:0")
    assert tiers(again) == tiers(plan)


def test_tensors_that_touch_in_file_and_memory_by_chance_are_read_one_by_one(tmp_path: Path) -> None:
    # An allocator may put two tensors side by side: they are still two, in storages of their own.
    path = tmp_path / "file"
    path.write_bytes(bytes(range(128)))
    memory = bytearray(128)
    targets = [torch.frombuffer(memory, dtype=torch.uint8, count=64, offset=offset) for offset in (0, 64)]
    file = SourceFile.at(path)
    pieces = [Piece(file, 64 * index, torch.uint8, target) for index, target in enumerate(targets)]
    assert [piece.offset for piece in merged(pieces)] == [0, 64]
