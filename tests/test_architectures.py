"""Transformers' architectures, each streamed from every tier: the bits are those of the resident model."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from models import ARCHITECTURES, IDS, MASK, Architecture, randomized
from overspill import units
from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.reader import FileReader
from overspill.plan import Plan
from overspill.store import merged
from overspill.transfer import Piece, Transfer
from support import TIERS, aligned, loaded, placed, save_checkpoint, streamed_units

pytestmark = [
    # DebertaV2 scripts two functions when its module is imported; torch deprecates scripting.
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is deprecated:DeprecationWarning"),
]


@dataclass(frozen=True)
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
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read from disk and copied from host memory since this was last cleared."""
    count: Counter[str] = Counter()
    read, from_host = FileReader.read, Transfer.from_host

    def counting_read(self: FileReader, file: Any, offset: int, target: memoryview) -> None:
        count["disk"] += len(target)
        read(self, file, offset, target)

    def counting_copy(self: Transfer, source: torch.Tensor, slab: Any) -> Any:
        count["cpu"] += source.nbytes
        return from_host(self, source, slab)

    monkeypatch.setattr(FileReader, "read", counting_read)
    monkeypatch.setattr(Transfer, "from_host", counting_copy)
    return count


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


def test_every_output_has_the_same_bits_and_the_bytes_really_moved(
    case: Case, tier: str, moved: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(case.architecture.build, case.checkpoint, tier)
    assert len(streamed_units(model)) >= (2 if tier == "mixed" else case.architecture.units)
    assert all(value.isfinite().all() for value in case.outputs.values())
    moved.clear()
    with caplog.at_level(logging.WARNING, logger="overspill"):
        for _ in range(2):
            assert_same(outputs_of(model, case.architecture), case.outputs)
    assert_moved(moved, tier, model)
    assert [record.message for record in caplog.records if record.name.startswith("overspill")] == []


@pytest.mark.usefixtures("everything_moves")
def test_every_output_has_the_same_bits_where_even_the_smallest_tensor_moves(case: Case, tier: str) -> None:
    model = loaded(case.architecture.build, case.checkpoint, tier)
    for _ in range(2):
        assert_same(outputs_of(model, case.architecture), case.outputs)


def test_the_state_is_the_resident_models_after_it_ran(case: Case, tier: str) -> None:
    model = loaded(case.architecture.build, case.checkpoint, tier)
    outputs_of(model, case.architecture)
    assert_same(model.state_dict(), case.state)


def test_weights_on_disk_take_no_memory_for_good_when_a_pass_only_reads_them(case: Case) -> None:
    model = loaded(case.architecture.build, case.checkpoint, "disk")
    before = in_host_memory(model)
    outputs_of(model, case.architecture)
    taken = in_host_memory(model) - before
    assert bool(taken) == case.architecture.edits_itself, taken


# Where it computes on an accelerator all three tiers can be told apart in a map; planning for one needs none.
@pytest.mark.parametrize("tier", ["cpu", "disk", "mixed"])
@pytest.mark.parametrize("size", ["tiny", "everything"])
def test_a_plan_that_goes_through_a_device_map_keeps_every_tier(
    case: Case, tier: str, size: str, request: pytest.FixtureRequest
) -> None:
    if size == "everything":
        request.getfixturevalue("everything_moves")
    with overspill.empty_weights():
        model = case.architecture.build()
    plan = placed(overspill.plan(model, {}, device="cuda:0"), tier)
    again = Plan.from_device_map(model, plan.device_map, device="cuda:0")
    assert tiers(again) == tiers(plan)
    assert again.stays == plan.stays


def tiers(plan: Plan) -> dict[str, str]:
    return {name: placement.tier.value for placement in plan.placements for name in placement.unit.tensors}


