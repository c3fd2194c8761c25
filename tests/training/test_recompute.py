"""Blocks that are computed once more: whatever they are called with."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.devices import RandomState
from training.loops import activations_of

Pair = namedtuple("Pair", ["first", "second"])


class Mixing(nn.Module):
    """A block that finds tensors in arguments of any form."""

    def __init__(self, find: Callable[[Any], list[torch.Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.find = find

    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        for tensor in self.find([*more, named]):
            x = x + tensor.sin()
        return torch.tanh(self.linear(x))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, tuple | list) else []


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "nothing": lambda a, b: ((), {}),
    "tuple": lambda a, b: ((), {"pair": (a, b)}),
    "nested": lambda a, b: (([a, {"b": (b, None, 3)}], None, True), {"c": 1.5, "d": "text", "e": [a]}),
    "namedtuple": lambda a, b: ((Pair(a, b), 2), {"pair": Pair(b, (a,))}),
    "ordered": lambda a, b: ((OrderedDict(z=a, y=b),), {"last": OrderedDict(x=[b], w=())}),
    "the same twice": lambda a, b: ((a, a), {"a": a}),
    "no container of ours": lambda a, b: ((slice(1, 2), {1, 2}, object()), {"b": b}),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_a_block_may_be_called_with_anything(device: str, form: str, recompute: bool) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    args, kwargs = FORMS[form](a, b)
    seen: list[str] = []

    def find(value: Any) -> list[torch.Tensor]:
        seen.append(repr([type(each) for each in value]))
        return tensors_in(value)

    model = nn.Sequential(Mixing(find), Mixing(find)).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    inputs = [x, a, b, *model.parameters()]

    def gradients() -> tuple[torch.Tensor | None, ...]:
        y = model[1](model[0](x, *args, **kwargs), *args, **kwargs)
        return torch.autograd.grad(y.square().sum(), inputs, allow_unused=True)

    expected = gradients()
    calls = len(seen)
    overspill.offload_training(model, layers=["0", "1"], recompute=recompute)
    found = gradients()
    assert activations_of(model).nbytes_sent > 0
    assert len(seen) == calls + (4 if recompute else 2)
    assert len(set(seen)) == 1, "each call was given the same kinds of arguments"
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


def test_random_numbers_are_drawn_again_and_then_go_on(device: str) -> None:
    here = torch.device(device)

    def draw() -> list[torch.Tensor]:
        return [torch.rand(5), torch.rand(5, device=here)]

    def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, first, second))

    torch.manual_seed(2**63 + 11)
    draw()
    state = RandomState(here)
    assert not state.has_passed()
    first, second = draw(), draw()
    assert state.has_passed()
    with state.again():
        assert same(draw(), first)
        assert same(draw(), second)
        draw()
    third = draw()
    with state.again():
        assert [draw(), draw()][1][0].equal(second[0])
        assert same(draw(), third), "what was drawn within did not count"
