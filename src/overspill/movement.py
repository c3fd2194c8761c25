"""Move the tensors in a call's arguments and results, however they are nested."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_NO_TENSORS = frozenset({bool, int, float, str})
_LEAVES = _NO_TENSORS | {torch.Tensor, nn.Parameter, type(None)}


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor], skip: Collection[str] = ()) -> Any:
    """`value` with each tensor in it replaced by `function` of it; the very same object if none was replaced.

    Looks into tuples, lists, mappings and dataclasses. Other objects (a key-value cache, say) look after their tensors
    themselves and are passed on as they are, and so is what stands under a name in `skip`.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None or type(value) in _NO_TENSORS:  # most arguments: all of them are looked at in each call
        return value
    if isinstance(value, tuple | list):
        items = [map_tensors(item, function, skip) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict or isinstance(value, Mapping):
        return _mapped(value, dict(value), function, skip)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return _mapped(value, fields, function, skip, rebuild=dataclasses.replace)
    return value


def _mapped(
    value: Any,
    entries: dict[Any, Any],
    function: Callable[[torch.Tensor], torch.Tensor],
    skip: Collection[str],
    rebuild: Callable[..., Any] | None = None,
) -> Any:
    moved = {key: item if key in skip else map_tensors(item, function, skip) for key, item in entries.items()}
    changed = {key: item for key, item in moved.items() if item is not entries[key]}
    if not changed:
        return value
    if rebuild is not None:
        return rebuild(value, **changed)
    if type(value) is dict:
        return moved
    return type(value)(**moved) if all(isinstance(key, str) for key in moved) else type(value)(moved)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Each tensor that `map_tensors` would find."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def to_device(value: Any, device: torch.device, skip: Collection[str] = ()) -> Any:
    """`value` with its tensors on `device`; the very same object if they are there."""
    if _is_all_on(device, value):  # as nearly always, and short steps wait for the long way
        return value
    return map_tensors(value, lambda tensor: tensor if tensor.device == device else tensor.to(device), skip)


def _is_all_on(device: torch.device, value: Any) -> bool:
    """Whether the tensors in `value` are on `device`. False where it has containers that are not of the usual kinds."""
    waiting = [value]
    for item in waiting:
        if isinstance(item, torch.Tensor):
            if item.device != device:
                return False
        elif item is None or type(item) in _NO_TENSORS:
            continue
        elif type(item) is tuple or type(item) is list:
            waiting.extend(item)
        elif type(item) is dict:
            waiting.extend(item.values())
        else:
            return False
    return True


def taken_apart(value: Any, leaves: list[Any]) -> Callable[[Iterator[Any]], Any]:
    """What makes the same of other leaves. Those of `value` are added to `leaves`, and nothing holds them besides.

    torch's own way is for containers of all kinds, and takes four times as long for the usual ones.
    """
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
        return next
    if kind is tuple or kind is list:
        parts = [taken_apart(item, leaves) for item in value]
        return lambda given: kind([part(given) for part in parts])
    if kind is dict:
        named = [(name, taken_apart(item, leaves)) for name, item in value.items()]
        return lambda given: {name: part(given) for name, part in named}
    flat, structure = tree_flatten(value)
    count = len(flat)
    leaves += flat
    return lambda given: tree_unflatten(list(islice(given, count)), structure)
