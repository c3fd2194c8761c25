"""`model.device` as Transformers and Diffusers tell it: people put inputs there, so it must be where a model computes.

Both take it from the first parameter, which rests in host memory or on disk while it is offloaded. A property belongs
to a class, so it is the class that learns to ask; every other model of it gives the answer that it always gave.
"""

from collections.abc import Iterator

import torch
from torch import nn

from overspill.homes import DiskTensor, HostTensor
from overspill.managed import computes_on

_LIBRARIES = ("transformers", "diffusers")
_taught: dict[type, property] = {}
"""Classes whose property asks us, and the property that they had."""


def teach_classes_of(model: nn.Module) -> None:
    """Let the property of every class in `model` that has one tell where offloaded models compute."""
    for kind in {type(module) for module in model.modules()}:
        for owner in _owners(kind):
            _taught[owner] = owner.device  # type: ignore[attr-defined]  # it has one: see `_owners`
            owner.device = _asking_first(_taught[owner])  # type: ignore[attr-defined]


def _owners(kind: type) -> Iterator[type]:
    """The classes below `kind` that have a property of their own, and have not been here before."""
    for owner in kind.__mro__:
        theirs = owner.__module__.partition(".")[0] in _LIBRARIES
        if theirs and isinstance(vars(owner).get("device"), property) and owner not in _taught:
            yield owner


def _asking_first(told: property) -> property:
    def device(self: nn.Module) -> torch.device:
        first = next(self.parameters(), None)
        if isinstance(first, HostTensor | DiskTensor):
            found = computes_on(first)
            if found is not None:
                return found
        answer: torch.device = told.__get__(self)
        return answer

    return property(device, doc=told.__doc__)
