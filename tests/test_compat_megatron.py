"""Megatron Bridge's options: its names, defaults and checks, on a model that Megatron does not know."""

import dataclasses
from typing import Any

import pytest
import torch

import overspill
from overspill.compat.megatron import CpuOffloading
from overspill.errors import PlanError
from overspill.homes import HostTensor
from overspill.training.activations import Limits
from training.loops import Net, activations_of, assert_same, pair, train


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = classmethod(lambda cls, device, double_buffering=True: cls(small=0, held=0, ahead=1 << 13))
    monkeypatch.setattr(Limits, "usual", usual)


def test_names_and_defaults_are_those_of_megatron_bridge() -> None:
    assert dataclasses.asdict(CpuOffloading()) == {
        "cpu_offloading": False,
        "cpu_offloading_num_layers": 0,
        "cpu_offloading_activations": True,
        "cpu_offloading_weights": False,
        "cpu_offloading_double_buffering": False,
    }


def test_the_options_cannot_be_changed_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CpuOffloading().cpu_offloading = True  # type: ignore[misc]


def test_off_leaves_the_model_alone() -> None:
    model = Net()
    assert CpuOffloading().apply(model) is model
    assert "_overspill" not in model.__dict__


@pytest.mark.parametrize(
    ("activations", "weights"), [(True, False), (False, True), (True, True)], ids=["activations", "weights", "both"]
)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_each_strategy_offloads_what_it_says_and_trains_the_same_bits(
    activations: bool, weights: bool, double_buffering: bool, device: str
) -> None:
    reference, model = pair(Net, device)
    options = CpuOffloading(
        cpu_offloading=True,
        cpu_offloading_num_layers=4,
        cpu_offloading_activations=activations,
        cpu_offloading_weights=weights,
        cpu_offloading_double_buffering=double_buffering,
    )
    assert options.apply(model) is model
    assert_same(train(model, device, steps=3), train(reference, device, steps=3))
    assert (activations_of(model).nbytes_sent > 0) == activations
    away = {name.split(".")[1] for name, p in model.named_parameters() if isinstance(p, HostTensor)}
    assert away == ({"0", "1", "2", "3"} if weights else set())
    overspill.restore(model)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("layers", [6, 7, 100])
def test_as_many_layers_as_there_are_cannot_be_offloaded(layers: int) -> None:
    with pytest.raises(PlanError, match=r"6 blocks, so it can be 0 to 5"):
        CpuOffloading(cpu_offloading=True, cpu_offloading_num_layers=layers).apply(Net())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_offloading": True, "cpu_offloading_num_layers": -1}, "negative"),
        ({"cpu_offloading": True, "cpu_offloading_activations": False}, "neither activations nor weights"),
        ({"cpu_offloading_num_layers": 3}, "cpu_offloading_num_layers has no effect"),
        ({"cpu_offloading_weights": True}, "cpu_offloading_weights has no effect"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        CpuOffloading(**options)
