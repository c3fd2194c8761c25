"""A model that overspill manages: what it was planned as, where its units are, and how its calls are led."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from overspill.attach import AlignScope, Interception, ModelScope, Scope, UnitScope
from overspill.offload_folder import OffloadFolder
from overspill.plan import Plan, Tier
from overspill.residency import Residency, Root
from overspill.slab import Window
from overspill.streamed import StreamedUnit
from overspill.transfer import Transfer

_ATTRIBUTE = "_overspill"


class Managed:
    """All that one managed model needs to run. Lives as long as the model, in an attribute that copies drop."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: Mapping[str, StreamedUnit],
        transfers: Mapping[torch.device, Transfer],
        windows: Mapping[torch.device, Window],
        folder: OffloadFolder | None,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.residencies: list[Residency] = []
        scopes: dict[nn.Module, list[Callable[[], Scope]]] = {}
        for device, roots in _roots(model, plan, units).items():
            residency = Residency(roots, windows[device], transfers[device])
            self.residencies.append(residency)
            for root in roots:
                scopes.setdefault(root.module, []).append(partial(UnitScope, root, residency))
        if len(plan.devices) > 1:
            for module, device in _aligned(model, plan):
                scopes.setdefault(module, []).append(partial(AlignScope, device))
        if scopes:  # around all others, also where the model is itself a unit
            around = partial(ModelScope, plan.device, _skipped_keys(model), self.refresh)
            scopes.setdefault(model, []).insert(0, around)
        self._interceptions = [Interception(module, makers) for module, makers in scopes.items()]

    def refresh(self) -> None:
        """Keep every interception in place: modules may have been compiled since the last call."""
        for interception in self._interceptions:
            interception.refresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is an ordinary model with the same values."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _roots(model: nn.Module, plan: Plan, units: Mapping[str, StreamedUnit]) -> dict[torch.device, list[Root]]:
    """The modules whose calls need streamed units, by device, in the order of the plan."""
    roots: dict[torch.device, dict[str, Root]] = {}
    for placement in plan.placements:
        if placement.tier is Tier.DEVICE:
            continue
        for path in placement.unit.roots:
            root = roots.setdefault(placement.device, {}).setdefault(path, Root(path, model.get_submodule(path)))
            root.units.append(units[placement.unit.name])
    return {device: list(by_path.values()) for device, by_path in roots.items()}


def _aligned(model: nn.Module, plan: Plan) -> Iterator[tuple[nn.Module, torch.device]]:
    """What is resident in a model that computes on several devices: its inputs must be brought to it."""
    for placement in plan.placements:
        if placement.tier is Tier.DEVICE:
            for path in placement.unit.roots:
                yield model.get_submodule(path), placement.device
    roots = {path for placement in plan.placements for path in placement.unit.roots}
    for owner in sorted({name.rpartition(".")[0] for name in plan.stays}):
        module = model.get_submodule(owner)
        if not any(owner == root or owner.startswith(f"{root}.") for root in roots) and not any(module.children()):
            yield module, plan.device


def _skipped_keys(model: nn.Module) -> frozenset[str]:
    """Arguments and results that look after their own devices, as Transformers' models name them."""
    keys = getattr(model, "_skip_keys_device_placement", None) or ()
    return frozenset([keys] if isinstance(keys, str) else keys)


def manage(model: nn.Module, managed: Managed) -> None:
    """Remember that `model` is managed."""
    model.__dict__[_ATTRIBUTE] = managed


def managed(model: nn.Module) -> Managed | None:
    """How `model` is managed, if it is."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Managed) else None
