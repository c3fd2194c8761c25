"""A model that overspill manages: what it was planned as, where its units are, and how its calls are led."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from overspill.attach import MANAGER, Added, AlignScope, Interception, ModelScope, Scope, UnitScope
from overspill.devices import CPU
from overspill.errors import StateError
from overspill.files import Files
from overspill.gate import gate_of
from overspill.homes import DiskTensor, HostTensor
from overspill.plan import Plan, Tier
from overspill.recording import Counts, Span
from overspill.rehoming import Origin
from overspill.residency import Residency
from overspill.slab import Window
from overspill.steps import Root
from overspill.streamed import StreamedUnit
from overspill.transfer import Transfer


class Training(Protocol):
    """What leads the calls of a model that is trained with less memory than it needs."""

    def scopes(self, refresh: Callable[[], None]) -> Mapping[nn.Module, Callable[[], Scope]]:
        """Around the calls of some modules, outside of whatever makes their units live.

        `refresh` is to be called when a pass begins.
        """

    def end(self) -> None:
        """The model is left to itself."""


@dataclass(frozen=True)
class Method:
    """A method that a managed model does in another way than its class."""

    applies: Callable[[nn.Module], bool]
    function: Callable[..., Any]


METHODS: Final[dict[str, Method]] = {}
"""By name; whoever knows such classes fills this in."""


WHEN_MANAGED: Final[list[Callable[[nn.Module], None]]] = []
"""Called with each model that streams something from now on."""


class _BoundMethod(Added):
    """A method in a model's own attributes, which must not hold the model alive."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        self._model, self._function = weakref.ref(model), function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._model(), *args, **kwargs)


class Managed:
    """All that one managed model needs to run. Lives as long as the model, in an attribute that copies drop.

    What changes where a unit rests makes another of these, with the same units.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: Mapping[str, StreamedUnit],
        transfers: Mapping[torch.device, Transfer],
        windows: Mapping[torch.device, Window],
        files: Files,
        origins: Mapping[int, Origin] | None = None,
        stored_as: Mapping[int, str] | None = None,
        training: Training | None = None,
    ) -> None:
        self.plan = plan
        self.units = dict(units)
        self.transfers = dict(transfers)
        self.windows = dict(windows)
        self.files = files
        self.origins = dict(origins or {})
        """By the id of a tensor that was there before: what it was then."""
        self.stored_as = dict(stored_as or {})
        """By the id of a tensor: the name that the checkpoint it was loaded from has for it."""
        self.training = training
        self.counts = Counts()
        self.traced: Sequence[Span] = ()
        """What the last trace has seen."""
        self.gate = gate_of(model)
        self.residencies: list[Residency] = []
        self._model = weakref.ref(model)
        scopes = self._scopes(model)
        self._interceptions = [Interception(module, self.gate, makers) for module, makers in scopes.items()]
        model.__dict__[MANAGER] = self
        if self._interceptions:
            for name, method in METHODS.items():
                if method.applies(model):
                    model.__dict__[name] = _BoundMethod(model, method.function)
            for call in WHEN_MANAGED:
                call(model)
        for unit in units.values():
            for home in unit.store.homes:
                _managed_by[home] = _Keeper(weakref.ref(self), unit.device)
        self.gate.on_idle = partial(_idle, weakref.ref(self))

    def _scopes(self, model: nn.Module) -> dict[nn.Module, list[Callable[[], Scope]]]:
        """What happens around the calls of each module, outermost first."""
        plan = self.plan
        scopes: dict[nn.Module, list[Callable[[], Scope]]] = {}
        for device, roots in _roots(model, plan, self.units).items():
            residency = Residency(roots, self.windows[device], self.transfers[device], self.counts)
            self.residencies.append(residency)
            for root in roots:
                scopes.setdefault(root.module, []).append(partial(UnitScope, root, residency))
        if len(plan.devices) > 1:
            for module, device in _aligned(model, plan):
                scopes.setdefault(module, []).append(partial(AlignScope, device))
        moves = bool(scopes or self.units)
        if self.training is not None:
            for module, make_scope in self.training.scopes(self.refresh).items():
                scopes.setdefault(module, []).insert(0, make_scope)
        if moves:  # around all others, also where the model is itself a unit
            around = partial(ModelScope, plan.device, _skipped_keys(model), self.refresh, self.counts)
            scopes.setdefault(model, []).insert(0, around)
        return scopes

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    def refresh(self) -> None:
        """Keep every interception in place: modules may have been compiled since the last call."""
        for interception in self._interceptions:
            interception.refresh()

    def intercept(self, module: nn.Module, make_scopes: Sequence[Callable[[], Scope]]) -> None:
        """Lead the calls of a module that were not led so far."""
        self._interceptions.append(Interception(module, self.gate, make_scopes))

    def detach(self) -> Callable[[], None]:
        """Leave the model to itself, or to another `Managed`. No call is under way.

        What is returned takes the interceptions away. Until then they stand where they are, so that calls which begin
        before another `Managed` stands there wait at the gate.
        """
        for residency in self.residencies:
            residency.clear()
        for interception in self._interceptions:
            interception.retire()
        self.gate.on_idle = _nothing
        if self.training is not None:
            self.training.end()
        for unit in self.units.values():
            for home in unit.store.homes:
                _managed_by.pop(home, None)
        self.model.__dict__.pop(MANAGER, None)
        for name in METHODS:
            if isinstance(self.model.__dict__.get(name), _BoundMethod):
                del self.model.__dict__[name]
        return self._remove_interceptions

    def _remove_interceptions(self) -> None:
        for interception in self._interceptions:
            interception.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is an ordinary model with the same values."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _apply(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    """`model.to(...)`, `.half()` and the like: what is offloaded stays where it is, and the rest moves.

    Trainer moves its model to the device that computes. What is offloaded gets there by itself, unit by unit.
    """
    manager = managed(model)
    assert manager is not None
    tensors = itertools.chain(model.parameters(), model.buffers())
    rest_there = True
    for dtype in {tensor.dtype for tensor in tensors if isinstance(tensor, HostTensor | DiskTensor)}:
        converted = convert(torch.empty(0, dtype=dtype))
        if converted.dtype != dtype or converted.device not in (CPU, manager.plan.device):
            raise StateError(
                f"this model has offloaded weights of {dtype} for {manager.plan.device}, which cannot become "
                f"{converted.dtype} on {converted.device} in place. overspill.restore(model, device=..., dtype=...) "
                "makes it an ordinary one first"
            )
        rest_there = rest_there and converted.device == CPU  # where homes are

    def converted_or_kept(tensor: torch.Tensor) -> torch.Tensor:
        stays = isinstance(tensor, HostTensor | DiskTensor) and not rest_there
        return tensor if stays else convert(tensor)

    type(model)._apply(model, converted_or_kept, *args, **kwargs)
    return model


METHODS["_apply"] = Method(lambda model: True, _apply)


def _idle(reference: "weakref.ref[Managed]") -> None:
    managed = reference()
    if managed is not None:
        for residency in managed.residencies:
            residency.idle()


def _nothing() -> None:
    """What an ordinary model does when it is idle."""


class _Keeper(NamedTuple):
    """Whoever manages a home, be it for a larger model, or for another one; and where it computes."""

    manager: "weakref.ref[Managed]"
    device: torch.device


_managed_by = WeakTensorKeyDictionary()
"""From each home to its `_Keeper`."""


def computes_on(home: torch.Tensor) -> torch.device | None:
    """Where an offloaded tensor is brought to be computed with; None for one that nobody manages."""
    keeper: _Keeper | None = _managed_by.get(home)
    return None if keeper is None else keeper.device


def managers_of(module: nn.Module) -> list[Managed]:
    """Whoever manages `module`, modules in it, or tensors of them."""
    own = (managed(part) for part in module.modules())
    tensors = itertools.chain(module.parameters(), module.buffers())
    keepers = (_managed_by.get(tensor) for tensor in tensors if isinstance(tensor, HostTensor | DiskTensor))
    managers = itertools.chain(own, (keeper.manager() for keeper in keepers if keeper is not None))
    return list(dict.fromkeys(manager for manager in managers if manager is not None))


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


def managed(model: nn.Module) -> Managed | None:
    """How `model` is managed, if it is."""
    found = model.__dict__.get(MANAGER)
    return found if isinstance(found, Managed) else None
