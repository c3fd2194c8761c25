"""A model that overspill manages: what it was planned as, where its units are, and how its calls are led."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from overspill.attach import AlignScope, Interception, ModelScope, UnitScope
from overspill.offload_folder import OffloadFolder
from overspill.plan import Plan, Tier
from overspill.residency import Residency, Root, StreamedUnit
from overspill.slab import Window
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
        self._interceptions: list[Interception] = []
        for device, roots in _roots(model, plan, units).items():
            self._stream(Residency(roots, windows[device], transfers[device]), roots)
        if len({placement.device for placement in plan.placements}) > 1:
            self._align(model)
        if self._interceptions:
            self._intercept_model(model)

    def _stream(self, residency: Residency, roots: Sequence[Root]) -> None:
        self.residencies.append(residency)
        for root in roots:
            make_scope = partial(UnitScope, root, residency)
            self._interceptions.append(Interception(root.module, make_scope, opaque=True))

    def _align(self, model: nn.Module) -> None:
        """Several compute devices: what is resident has its inputs brought to it."""
        for placement in self.plan.placements:
            if placement.tier is Tier.DEVICE:
                for path in placement.unit.roots:
                    self._align_module(model.get_submodule(path), placement.device)
        owners = {name.rpartition(".")[0] for name in self.plan.stays}
        roots = {path for placement in self.plan.placements for path in placement.unit.roots}
        for owner in sorted(owners):
            module = model.get_submodule(owner)
            if not any(owner == root or owner.startswith(f"{root}.") for root in roots) and not any(module.children()):
                self._align_module(module, self.plan.device)

    def _align_module(self, module: nn.Module, device: torch.device) -> None:
        self._interceptions.append(Interception(module, partial(AlignScope, device), opaque=False))

    def _intercept_model(self, model: nn.Module) -> None:
        skip = getattr(model, "_skip_keys_device_placement", None) or ()
        keys = frozenset([skip] if isinstance(skip, str) else skip)
        make_scope = partial(ModelScope, self.plan.device, keys, self.refresh)
        self._interceptions.append(Interception(model, make_scope, opaque=False))

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


def manage(model: nn.Module, managed: Managed) -> None:
    """Remember that `model` is managed."""
    model.__dict__[_ATTRIBUTE] = managed


def managed(model: nn.Module) -> Managed | None:
    """How `model` is managed, if it is."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Managed) else None
