"""Tensors moved wherever they are nested; everything else stays the object that it is."""

import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from overspill import movement
from overspill.movement import map_tensors, taken_apart, tensors_in, to_device

META = torch.device("meta")
Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    """A dataclass with a field that its constructor does not take."""

    hidden: torch.Tensor
    name: str = "x"
    count: int = field(init=False, default=7)


class Output(OrderedDict[str, Any]):
    """A mapping that is made of keywords, as Transformers' outputs are."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)


def tensor() -> torch.Tensor:
    return torch.ones(2)


NESTED = {
    "a tensor": tensor(),
    "a tuple": (tensor(), 3, "x"),
    "a list": [None, [tensor()]],
    "a named tuple": Pair(tensor(), 2.0),
    "a dict": {"a": tensor(), "b": {"c": (tensor(),)}},
    "a dict with keys that are no names": OrderedDict({1: tensor(), ("a", 2): 4}),
    "a mapping made of keywords": Output(a=tensor(), b=None),
    "a dataclass": Result(tensor()),
    "a dataclass in a dict": {"result": [Result(tensor(), "y")]},
}


@pytest.mark.parametrize("value", NESTED.values(), ids=NESTED)
def test_each_tensor_moves_and_its_containers_are_of_the_same_kind(value: Any) -> None:
    count = len(list(tensors_in(value)))
    assert count >= 1
    moved = to_device(value, META)
    assert [found.device for found in tensors_in(moved)] == [META] * count
    assert _shape(moved) == _shape(value)
    assert [found.device.type for found in tensors_in(value)] == ["cpu"] * count, "the caller's own are left alone"


@pytest.mark.parametrize("value", NESTED.values(), ids=NESTED)
def test_what_is_there_already_is_the_very_same_object(value: Any) -> None:
    assert to_device(value, torch.device("cpu")) is value


def test_what_stands_under_a_name_to_skip_stays() -> None:
    kept, cache = tensor(), object()
    value = {"past": kept, "inner": Output(past=kept, x=tensor()), "cache": cache}
    moved = to_device(value, META, skip=["past"])
    assert moved["past"] is kept
    assert moved["inner"]["past"] is kept
    assert moved["inner"]["x"].device == META
    assert moved["cache"] is cache, "an object that looks after its tensors itself"


def test_a_field_that_the_constructor_does_not_take_is_made_anew() -> None:
    moved = map_tensors(Result(tensor(), "y"), lambda value: value + 1)
    assert (moved.hidden.tolist(), moved.name, moved.count) == ([2.0, 2.0], "y", 7)
    assert map_tensors(Result, lambda value: value + 1) is Result, "a class is no value"


def _shape(value: Any) -> Any:
    """The kinds of a nested value, without its tensors' devices."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape
    if isinstance(value, dict):
        return type(value), [(key, _shape(item)) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [_shape(item) for item in value]
    if isinstance(value, Result):
        return Result, _shape(value.hidden), value.name, value.count
    return value


def test_what_is_where_it_belongs_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("taken apart")

    monkeypatch.setattr(movement, "map_tensors", refuse)
    nested = ((tensor(), [None, 3]), {"pair": (tensor(), "x"), "none": None})
    assert to_device(nested, torch.device("cpu")) is nested
    with pytest.raises(AssertionError, match="taken apart"):
        to_device(nested, META)
    with pytest.raises(AssertionError, match="taken apart"):  # nobody knows what is in there without a look
        to_device((Result(tensor()),), torch.device("cpu"))


@pytest.mark.parametrize("name", NESTED)
def test_what_was_taken_apart_is_held_by_its_leaves_alone(name: str) -> None:
    leaves: list[Any] = []
    value = map_tensors(NESTED[name], torch.clone)
    rebuild = taken_apart(((value,), {"also": value}), leaves)
    again = rebuild(iter(leaves))
    assert _shape(again) == _shape(((value,), {"also": value}))
    assert list(map(id, tensors_in(again))) == list(map(id, tensors_in((value, value))))
    references = [weakref.ref(each) for each in tensors_in(value)]
    del value, again
    leaves.clear()
    assert references
    assert not any(reference() for reference in references)
