"""A streamed unit and its states, HOME -> FETCHING -> LIVE. With stand_ins.py, the only file to write `_parameters`.

Note: states and what they cost on the compute device.
  HOME      nothing. The modules show the homes.
  FETCHING  a slab, being filled. The modules show the homes. Entered on demand, or ahead of it by the schedule.
  LIVE      a slab, filled. The modules show live tensors, views of the slab, while at least one call uses the unit.
            Unused, it stays until its room is wanted: then the slab is dropped. Nothing is copied back, since clean
            weights are the same as their homes; what a forward did write goes home as soon as the call ends.
"""

import itertools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from overspill.devices import CPU, storage_users
from overspill.graph import onload
from overspill.homes import DiskTensor, HostTensor
from overspill.host_link import Landing
from overspill.mapping import MappedSlab
from overspill.slab import Slab
from overspill.stand_ins import take_back
from overspill.store import Store
from overspill.tensors import Place, TensorSpec
from overspill.transfer import Fetch, Transfer
from overspill.units import modules_below

_NOT_FETCHED = object()  # equal to no stamp


class _Live(torch.Tensor):
    """A weight to compute with. An edit through `.data` leaves no trace in its version, so it is noticed here."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    data_was_used = False

    @property
    def data(self) -> torch.Tensor:
        if torch.compiler.is_compiling():  # a compiler takes an edit through a detached tensor for one like others
            return self.detach()
        self._note_use()
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._note_use()
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]

    def _note_use(self) -> None:
        self.data_was_used = True
        _last_use.number = next(_uses)  # second: whoever has seen this number sees the mark as well


class _LastUse:
    """The last use of any live tensor's `.data`: while it is the same, nobody has to ask each of them."""

    number = 0  # another one each time


_last_use, _uses = _LastUse(), itertools.count(1)


class LiveParameter(_Live, nn.Parameter):
    """One that is shown as what its home is."""


class LiveResult(_Live):
    """One that is a result of its home, so that its gradient arrives there."""

    _is_param = True  # for whoever asks: its home is one


def is_live(tensor: torch.Tensor) -> bool:
    """Whether a module shows it in the place of a home for as long as a call lasts. Buffers are not told apart."""
    return isinstance(tensor, _Live)


_HERE_OR_HOME = (LiveResult, LiveParameter, HostTensor, DiskTensor)
_SHOWN = {LiveResult, LiveParameter, type(None)}


_Bound = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]
"""One entry of a module's table that shows something else than its home at the moment: table, name, home, shown."""


def _undo(bound: Iterable[_Bound]) -> None:
    for table, name, home, shown in bound:
        take_back(table, name, shown, home)


class StreamedUnit:
    """One unit that comes to the compute device when it is needed. Its residency serialises every call."""

    def __init__(
        self, name: str, store: Store, places: Sequence[Sequence[Place]], device: torch.device, *, kept: bool
    ) -> None:
        self.name, self.store, self.device = name, store, device
        self.nbytes = store.layout.nbytes
        self.kept = kept  # the window has room for it beside what streams through: once there, it stays
        self.users = 0
        self.calls = 0  # of the users: those that the modules show live tensors for. The others are backwards
        self.slab: Slab | None = None
        self.fetch: Fetch | None = None
        self.checked_in = -1  # the pass in which the copy was last compared with the homes
        self.arrived_for: object = None  # the backward, and its stream, that have waited for the slab already
        self._places = places
        everywhere = [place for shared in places for place in shared]
        self._written_unseen = [place for place in everywhere if isinstance(place.module, _NormBase)]
        self._recurrent = [place.module for place in everywhere if isinstance(place.module, nn.RNNBase)]
        self._everywhere = [
            (place.module, place.name, index) for index, shared in enumerate(places) for place in shared
        ]
        self._live: list[torch.Tensor] = []
        self._parameters: dict[int, LiveParameter] = {}  # the same tensors, to be shown as what their homes are
        self._results: dict[int, LiveResult] = {}  # … and as results of them, while they are shown so
        self._landings: dict[int, Landing] = {}  # of gradients that leave together, by the first of them
        self._stamps: list[object] = []
        self._versions: list[int] = []
        self._bound: list[_Bound] = []
        self._strays: list[tuple[_Bound, int]] = []  # with the version of what is shown: nobody else sends edits home
        self._bound_with_grad = False
        self._no_use_since = 0  # of any shown tensor's `.data`: the last use of those of all units then
        self._unshared: list[int] = []  # how often each live tensor is referred to while nobody outside has it

    def part(self, indices: Sequence[int]) -> "StreamedUnit":
        """Some of its tensors, where they are, as a unit of their own. This one is not used any more."""
        places = [self._places[index] for index in indices]
        return StreamedUnit(self.name, self.store.part(indices), places, self.device, kept=self.kept)

    def again(self) -> "StreamedUnit":
        """The same tensors as another unit, for another residency.

        A backward that began before has this one, under its residency's lock, and may be waiting for it right now.
        """
        return StreamedUnit(self.name, self.store, self._places, self.device, kept=self.kept)

    def could_be(self, other: "StreamedUnit") -> bool:
        """Whether the other can have this one's slab as it is, tensors and all, when this one has dropped it.

        Buffers are shown as those very tensors, and whoever sees one can do anything to it.
        """
        return self.store.layout is other.store.layout and self.kept == other.kept and self._has_no_buffers

    @cached_property
    def _has_no_buffers(self) -> bool:
        return all(isinstance(home, nn.Parameter) for home in self.store.homes)

    # HOME -> FETCHING, and back to HOME from anywhere.

    def start(self, slab: Slab, transfer: Transfer, priority: int) -> None:
        stamps = enumerate(self.store.stamps())
        self._stamps = [stamp if self.store.brings(index) else _NOT_FETCHED for index, stamp in stamps]
        self.arrived_for = None
        self.slab = slab
        slab.name = self.name
        if not isinstance(slab, MappedSlab):
            slab.layout = self.store.layout
        self._transfer = transfer
        self.fetch = self.store.fetch(slab, transfer, priority)

    def is_outdated(self) -> bool:
        """Whether most of what was fetched has been edited at home since: an optimizer's step is not worth mending."""
        if not self._stamps:
            return True  # an interrupt came before anything was fetched
        stamps = self.store.stamps()
        if stamps == self._stamps:
            return False
        pairs = zip(stamps, self._stamps, self.store.layout.specs, strict=True)
        # A stamp that is a mere object says nothing: that tensor is looked at whenever the unit is made live.
        told = [pair for pair in pairs if type(pair[0]) is not object and type(pair[1]) is not object]
        return 2 * sum(spec.nbytes for now, then, spec in told if now != then) > self.nbytes

    def drop(self) -> Fetch | None:
        """Give up the slab. The fetch that still fills it, if any, keeps the memory until it has ended."""
        self.collect_writes(after_call=False)
        fetch, self.fetch = self.fetch, None
        if isinstance(self.slab, MappedSlab):
            self.slab.end_leases()
        self.arrived_for = None
        self.slab, self._live, self._parameters = None, [], {}
        if fetch is None or fetch.finished():
            return None
        fetch.cancel()
        return fetch

    # Where the files' own pages do for a slab: see mapping.py.

    @property
    def mapped(self) -> MappedSlab | None:
        """Its slab, if that shows files' pages."""
        return self.slab if isinstance(self.slab, MappedSlab) and not self.slab.is_own else None

    def let_go(self) -> None:
        """Nobody uses the unit any more: its files may change until it is used again."""
        slab = self.slab
        if not isinstance(slab, MappedSlab):
            return
        self.arrived_for = None
        try:
            if not slab.is_own and self._is_kept_outside(slab):
                slab.make_own()
            slab.let_go()
        finally:
            slab.end_leases()
            if slab.is_own:
                self.drop()  # memory that no window counts
            else:
                self.fetch = None  # next time the pages may have to be brought in again

    def _is_kept_outside(self, slab: MappedSlab) -> bool:
        """Whether somebody has a live tensor, or a view of one, that outlives the call."""
        references = zip(_references(slab, self._shown_plainly()), self._unshared, strict=True)
        return bool(self._live) and any(now > before for now, before in references)

    # FETCHING -> LIVE: the bytes have been waited for.

    def make_live(self) -> None:
        """Build the live tensors where there are none."""
        assert self.slab is not None
        if self._live:
            return
        live = list(self.slab.tensors())
        self._versions = [tensor._version for tensor in live]
        self._live = live
        if isinstance(self.slab, MappedSlab):
            self.slab.is_filled = True
            self._unshared = _references(self.slab, self._shown_plainly())

    def bring_up_to_date(self) -> None:
        """Let the slab have what was edited at home since it was fetched."""
        stamps = self.store.stamps()
        if stamps == self._stamps or self._bound_with_grad:  # a graph that is being made depends on them
            return
        self.make_live()
        with torch.inference_mode(False), torch.no_grad():
            self._refresh_edited(stamps)

    def _refresh_edited(self, stamps: list[object]) -> None:
        for index, live in enumerate(self._live):
            if stamps[index] != self._stamps[index]:
                self._refresh(index, live)
        self._stamps = stamps

    def _refresh(self, index: int, live: torch.Tensor) -> None:
        home = self.store.homes[index]
        if TensorSpec.of(home) == self.store.layout.specs[index]:
            self.store.refresh(index, live)
        else:  # a home that was given another dtype or shape has no room in the slab
            live = self._live[index] = home.detach().to(self.device) if isinstance(home, nn.Parameter) else home
            self._parameters.pop(index, None)
        self._versions[index] = live._version

    # LIVE: the modules show the live tensors while somebody uses the unit.

    def bind(self, root: nn.Module, *, is_first: bool = False) -> None:
        """Show the live tensors. With gradients on, as results of `onload`, which brings gradients to the homes.

        Those of what a forward needs first are computed last.
        """
        with_grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if self._bound and (self._bound_with_grad or not with_grad):
            return
        shown = self._onloaded(is_first=is_first) if with_grad else self._shown_plainly()
        # One in the place of the other: calls of other threads are under way, and must not see a home in between.
        before, self._bound = {id(bound[3]) for bound in self._bound}, []
        self._bound_with_grad = with_grad
        homes = self.store.homes
        for module, name, index in self._everywhere:
            table: dict[str, Any] = module._parameters  # as `table_of` does, without a call for each
            if name not in table:
                table = module._buffers
            current, home = table.get(name), homes[index]
            if current is home or id(current) in before:  # else the user put another there: that is the truth now
                table[name] = shown[index]
                self._bound.append((table, name, home, shown[index]))
        self._refresh_flat_weights()
        if not self._strays:
            self._bind_strays(root)

    def _shown_plainly(self) -> list[torch.Tensor]:
        """The live tensors for a call without gradients."""
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return [self._shown_as_its_home(index) for index in range(len(self._live))]

    def _shown_as_its_home(self, index: int) -> torch.Tensor:
        home = self.store.homes[index]
        if not isinstance(home, nn.Parameter):
            return self._live[index]
        live = self._parameters.get(index)
        if live is None:
            live = self._parameters[index] = LiveParameter(self._live[index], requires_grad=home.requires_grad)
            # Only for code that turns gradients on inside a call that had them off: see `_onloaded` for the usual way.
            live._post_accumulate_grad_hooks = OrderedDict({0: _GradientGoesHome(home)})
        elif live.requires_grad != home.requires_grad:  # it was frozen meanwhile, or is trained from now on
            live.requires_grad_(home.requires_grad)
        return live

    def _onloaded(self, *, is_first: bool) -> list[torch.Tensor]:
        """The live tensors for a call whose graph is to bring gradients to the homes."""
        homes, pace = self.store.homes, self._transfer.host_link.pace
        together = pace.last_together if is_first else pace.together
        with torch._C.DisableTorchFunctionSubclass():
            trained = [index for index, home in enumerate(homes) if home.requires_grad]
        lives = [self._live[index].detach() for index in trained]
        onloaded = onload([homes[index] for index in trained], lives, self._landing_of, together)
        for live in onloaded:
            live.__class__ = LiveResult
        shown = self._results = dict(zip(trained, cast(list[LiveResult], onloaded), strict=True))
        if len(shown) == len(homes):
            return onloaded
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return [shown[index] if index in shown else self._shown_as_its_home(index) for index in range(len(homes))]

    def _landing_of(self, first: int) -> Landing:
        if first not in self._landings:
            self._landings[first] = Landing(self._transfer.host_link)
        return self._landings[first]

    def _bind_strays(self, root: nn.Module) -> None:
        """Bring along what was added to the unit's modules after planning: adapters, replaced weights."""
        if self.device.type == "cpu":
            return
        for module in modules_below(root):
            # Short steps wait for this look at each tensor, and nearly always all parameters are those that we show.
            if not _SHOWN.issuperset(map(type, module._parameters.values())):
                self._bring_strays(module._parameters)
            if module._buffers:
                self._bring_strays(module._buffers)

    def _bring_strays(self, table: dict[str, Any]) -> None:
        for name, tensor in table.items():
            # A home is no stray, wherever it says it is: outside of a call of the model that is the CPU.
            if tensor is not None and not isinstance(tensor, _HERE_OR_HOME) and tensor.device != self.device:
                moved = tensor.to(self.device)
                table[name] = moved
                self._strays.append(((table, name, tensor, moved), moved._version))

    def unbind(self) -> None:
        """Show the homes again, once what the forward wrote has gone there."""
        try:
            self.collect_writes(after_call=True)
        finally:  # what could not go there is tried again when the unit is dropped
            self._unbind_tensors()
            self._unbind_strays()

    def _unbind_strays(self) -> None:
        for (_, _, home, shown), version in self._strays:
            if shown._version != version:
                with torch.no_grad():
                    home.copy_(shown)
        _undo(bound for bound, _ in self._strays)
        self._strays = []

    def _unbind_tensors(self) -> None:
        _undo(self._bound)
        self._bound, self._bound_with_grad, self._results = [], False, {}
        self._refresh_flat_weights()

    def _refresh_flat_weights(self) -> None:
        for module in self._recurrent:
            refresh_flat_weights(module)

    def collect_writes(self, *, after_call: bool) -> None:
        """Send home what was written to live tensors. `after_call`: also what a call may have written unseen."""
        if not self._live or not self._may_have_been_written(after_call=after_call):
            return
        with torch.inference_mode(False), torch.no_grad():
            for index, live in enumerate(self._live):
                unseen = after_call and any(_updates_unseen(place) for place in self._places[index])
                if unseen or live._version != self._versions[index]:
                    self._send_home(index, live)
                for shown in (self._parameters.get(index), self._results.get(index)):
                    if shown is not None and self._edited_through_data(index, shown):
                        self._send_home(index, shown.detach())

    def _may_have_been_written(self, *, after_call: bool) -> bool:
        """Whether any live tensor was: asked twice for each copy, and nearly always not."""
        if after_call and any(_updates_unseen(place) for place in self._written_unseen):
            return True
        return [live._version for live in self._live] != self._versions or self._data_was_used()

    def _data_was_used(self) -> bool:
        last_use = _last_use.number
        if last_use == self._no_use_since:
            return False
        if any(shown.data_was_used for shown in (*self._parameters.values(), *self._results.values())):
            return True
        self._no_use_since = last_use
        return False

    def _send_home(self, index: int, values: torch.Tensor) -> None:
        live = self._live[index]
        self.store.absorb(index, values, edits=live._version - self._versions[index])
        self._versions[index] = live._version
        self._stamps[index] = self.store.stamps()[index]
        if values.data_ptr() != live.data_ptr():  # it was given other memory: what is in the slab is outdated
            self._parameters.pop(index, None)
            self._stamps[index] = _NOT_FETCHED

    def version(self, index: int) -> int:
        """Grows with each in-place edit of a tensor that autograd would notice, at home or in a call."""
        with torch._C.DisableTorchFunctionSubclass():  # a home's own way to its version is long
            return self.store.version(index) + self.edits(index)

    def versions_at_home(self) -> list[int]:
        """How far the homes' own edits have come."""
        with torch._C.DisableTorchFunctionSubclass():
            return [self.store.version(index) for index in range(len(self.store.homes))]

    def edits(self, index: int) -> int:
        """How often a live tensor was edited since it has its home's values."""
        return self._live[index]._version - self._versions[index] if self._live else 0

    def _edited_through_data(self, index: int, live: _Live) -> bool:
        if not live.data_was_used:
            return False
        live.data_was_used = False
        # Most uses of .data only read (compilers do). Comparing is slow, but an edit that never happened costs memory.
        before = torch.empty_like(live, device="cpu")
        self.store.refresh(index, before)
        flat = self.store.layout.specs[index].flat
        return not torch.equal(flat(before).view(torch.uint8), flat(live.detach().cpu()).view(torch.uint8))


def _references(slab: Slab, live: Sequence[torch.Tensor]) -> list[int]:
    """How often a slab's memory and each of the live tensors over it are referred to."""
    return [storage_users(slab.memory.untyped_storage()), *(sys.getrefcount(tensor) for tensor in live)]


def _updates_unseen(place: Place) -> bool:
    """Whether its module writes to a buffer in each call without a trace in the version: normalisations in training."""
    module = place.module
    return isinstance(module, _NormBase) and module.training and place.name in ("running_mean", "running_var")


class _GradientGoesHome:
    """A gradient that reached a live parameter itself is added to its home's."""

    def __init__(self, home: torch.Tensor) -> None:
        self._home = home

    def __call__(self, live: torch.Tensor) -> None:
        assert live.grad is not None
        gradient = live.grad.detach().to(CPU)  # where homes are
        live.grad = None
        self._home.grad = gradient if self._home.grad is None else self._home.grad + gradient


def table_of(place: Place) -> dict[str, Any]:
    """The module's own table in which the tensor of `place` hangs."""
    module = place.module
    return module._parameters if place.name in module._parameters else module._buffers


def refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a second list of their weights, which must show the same tensors."""
    if isinstance(module, nn.RNNBase):
        module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in module._flat_weights_names]
