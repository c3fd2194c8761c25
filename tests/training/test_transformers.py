"""Transformers' architectures in training: with what is away while it is not needed, the bits are the resident ones."""

import copy
import gc
import logging
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import cache_utils

import overspill
from models import ARCHITECTURES, Architecture, randomized
from overspill.training import blocks
from support import aligned
from training.loops import STRATEGIES, activations_of

LAYERS = {"albert": ["albert.encoder.albert_layer_groups.0"]}
"""Of those whose one layer runs several times."""

REMEMBER = {"recurrent-gemma"}
"""Those that keep what they computed in their modules, where a replay finds it."""

ON_A_GPU = {"llama", "gemma3", "t5", "whisper"}
"""Those whose operations have deterministic kernels there."""

STEPS = 3


def architectures() -> Iterator[Any]:
    for architecture in ARCHITECTURES:
        yield pytest.param(architecture, "cpu", id=f"{architecture}-cpu")
        if architecture.name in ON_A_GPU:
            yield pytest.param(architecture, "cuda:0", id=f"{architecture}-cuda:0", marks=pytest.mark.gpu)


def pair(architecture: Architecture, device: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = randomized(architecture.build()).train().to(device)
    if architecture.name in REMEMBER:
        model.config.use_cache = False
    return aligned(model), aligned(copy.deepcopy(model))


def train(model: nn.Module, architecture: Architecture, device: str) -> dict[str, torch.Tensor | None]:
    """Everything that a few steps show."""
    torch.manual_seed(5)
    np.random.seed(5)  # of the masks of speech models
    random.seed(5)
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in architecture.inputs.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5, foreach=False)
    found: dict[str, torch.Tensor | None] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(**inputs).values())
        loss.backward()
        found[f"loss of step {step}"] = loss.detach().cpu()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            found[f"gradient of {name} in step {step}"] = None if gradient is None else gradient.cpu().clone()
        optimizer.step()
    return found | {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def loss_of(outputs: Any) -> torch.Tensor:
    """Of every tensor that has a gradient, but for those in caches."""
    loss = torch.zeros(())
    for output in outputs:
        if isinstance(output, tuple | list):
            loss = loss + loss_of(output).cpu()
        elif isinstance(output, dict):
            loss = loss + loss_of(output.values()).cpu()
        elif isinstance(output, torch.Tensor) and output.requires_grad:
            loss = loss + output.float().square().mean().cpu()
    return loss


@pytest.mark.parametrize("strategy", ["weights", "recompute", "all"])
@pytest.mark.parametrize(("architecture", "device"), list(architectures()))
def test_training_has_the_same_bits(architecture: Architecture, device: str, strategy: str) -> None:
    reference, model = pair(architecture, device)
    expected = train(reference, architecture, device)
    overspill.offload_training(model, layers=LAYERS.get(architecture.name), **STRATEGIES[strategy])
    found = train(model, architecture, device)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        mine = found[name]
        assert (mine is None) == (value is None), name
        assert value is None or torch.equal(mine, value), name
    if strategy != "weights":
        assert activations_of(model).nbytes_sent > 0, "nothing left the device"


def test_a_cache_is_filled_once_and_gone_with_its_step(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    architecture = next(each for each in ARCHITECTURES if each.name == "llama")
    _, model = pair(architecture, device)
    inputs = {k: v.to(device) for k, v in architecture.inputs.items() if k != "attention_mask"}
    overspill.offload_training(model, recompute=True, weights=True)
    blocks._warn_of_cache.cache_clear()
    caches: weakref.WeakSet[Any] = weakref.WeakSet()
    make = cache_utils.DynamicCache.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        caches.add(self)

    monkeypatch.setattr(cache_utils.DynamicCache, "__init__", noting)
    gc.disable()
    try:
        for with_backward in (True, False, True):
            output = model(**inputs)
            if with_backward:
                output.logits.square().mean().backward()
            (cache,) = caches
            assert [layer.get_seq_length() for layer in cache.layers] == [inputs["input_ids"].shape[1]] * 4
            del output, cache
            assert not caches, "what was computed holds what it was computed from"
    finally:
        gc.enable()
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "use_cache=False" in told[0]
