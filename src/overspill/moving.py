"""Tensors of a model in memory, moved to other tiers and back, with the objects that people hold kept the same.

Everything new is staged aside: memory, files, pinned pages. The model is touched in the last step only, so a full disk
or a failed allocation leaves it as it was.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from overspill.bundles import Bundle, BundleTensor
from overspill.checkpoint.index import FileSpan, SourceFile
from overspill.config import format_size
from overspill.devices import ALONE_ON_ITS_PAGES, CPU, PinnedRanges, copy_bytes, files_in_memory, free_memory
from overspill.errors import BudgetError, StateError
from overspill.file_store import FileStore
from overspill.files import Files
from overspill.homes import DiskTensor, DiskValues, HostTensor, ordinary
from overspill.managed import Managed, Training
from overspill.plan import Placement, Plan, Rates, Tier
from overspill.rehoming import Origin, check_can_turn, let_go, plain_kind, turn_into_plain
from overspill.slab import Layout, Window
from overspill.store import DiskStore, HostStore, Store, merged, pieces_of
from overspill.streamed import StreamedUnit, refresh_flat_weights
from overspill.tensors import TensorGroup, TensorSpec, is_dense, tensor_groups
from overspill.transfer import Piece, Transfer
from overspill.units import Unit, cut_out, is_below, owner_path
from overspill.windows import least_window, usual_window


def tier_of(tensor: torch.Tensor) -> Tier:
    """Where a tensor rests."""
    if isinstance(tensor, DiskTensor):
        return Tier.DISK
    return Tier.CPU if isinstance(tensor, HostTensor) else Tier.DEVICE


@dataclass
class _Staged:
    """What is ready to be committed."""

    stores: list[tuple[Placement, Store]] = field(default_factory=list)
    plain: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # a tensor, and its new values
    bundles: list[Bundle] = field(default_factory=list)


class Mover:
    """One change of where the tensors of a model rest. The model's gate is closed meanwhile."""

    def __init__(
        self, model: nn.Module, managers: Sequence[Managed], *, files: Files | None = None, remember: bool = True
    ) -> None:
        self.model = model
        self.groups = tensor_groups(model)
        self.remembers = remember  # where a tensor was, to restore it there
        self._managers = list(managers)  # of the model, and of parts of it: all of it will have one
        self._names = {id(group.tensor): name for name, group in self.groups.items()}
        self._streamed = [entry for manager in managers for entry in self._entries(manager)]
        self._files = files or next((manager.files for manager in managers), None) or Files()
        self._transfers: dict[torch.device, Transfer] = {}
        self._origins: dict[int, Origin] = {}
        self._stored_as: dict[int, str] = {}
        for manager in managers:
            self._transfers |= manager.transfers
            self._origins |= manager.origins
            if manager.model is model:
                self._stored_as |= manager.stored_as
        self._staged = _Staged()

    def _entries(self, manager: Managed) -> Iterator[tuple[Placement, StreamedUnit]]:
        """What a manager streams, by the names that it has in this model."""
        path = next(path for path, module in self.model.named_modules() if module is manager.model)
        for placement in manager.plan.placements:
            unit = manager.units.get(placement.unit.name)
            if unit is not None and placement.tier is not Tier.DEVICE:
                here = _below(path, placement.unit)
                # A tensor that is tied to one outside of the manager's part may have another first name here.
                named = zip(unit.store.homes, here.tensors, strict=True)
                tensors = tuple(self._names.get(id(home), name) for home, name in named)
                yield replace(placement, unit=replace(here, tensors=tensors)), unit

    # What there is.

    def is_resident(self, name: str, device: torch.device) -> bool:
        """Whether a tensor is an ordinary one on `device`."""
        tensor = self.groups[name].tensor
        return tier_of(tensor) is Tier.DEVICE and tensor.device == device

    def is_others(self, name: str) -> bool:
        """Whether a tensor is offloaded as a part of another model."""
        tensor = self.groups[name].tensor
        return tier_of(tensor) is not Tier.DEVICE and not any(_holds(unit, tensor) for _, unit in self._streamed)

    def device_of(self, name: str) -> torch.device:
        """Where a tensor computes now."""
        tensor = self.groups[name].tensor
        if tier_of(tensor) is Tier.DEVICE:
            return tensor.device
        return next(unit.device for _, unit in self._streamed if _holds(unit, tensor))

    def origin_of(self, name: str) -> Origin:
        """What a tensor was before it was offloaded; for one that was loaded, what it would be on its device."""
        tensor = self.groups[name].tensor
        return self._origins.get(id(tensor)) or Origin(plain_kind(tensor), self.device_of(name))

    # Staging.

    def stage(
        self, placements: Sequence[Placement], folder: str | os.PathLike[str] | None, *, edited: bool = False
    ) -> None:
        """Have what each placement's unit holds ready in its new tier. `edited`: so often that files are too."""
        for placement in placements:
            for name in placement.unit.tensors:
                check_can_turn(name, self.groups[name].tensor)
        self._stage_host([placement for placement in placements if placement.tier is Tier.CPU])
        on_disk = [placement for placement in placements if placement.tier is Tier.DISK]
        if edited:
            self._stage_edited(on_disk)
        else:
            self._stage_disk(on_disk, folder)

    def stage_plain(
        self, names: Iterable[str], where: Callable[[str], tuple[torch.device, torch.dtype | None]]
    ) -> None:
        """Have tensors ready as ordinary ones, each on the device and in the dtype that `where` says."""
        wanted = {name: where(name) for name in names}
        for name in wanted:
            check_can_turn(name, self.groups[name].tensor)
        self._check_room(wanted)
        pieces: dict[torch.device, list[Piece]] = {}
        for name, (device, dtype) in wanted.items():
            tensor = self.groups[name].tensor
            if isinstance(tensor, DiskTensor):
                values = self._read(tensor, device, dtype, pieces)
            else:
                values = _cast(ordinary(tensor), device, dtype)
            self._staged.plain.append((tensor, values))
        for device, wanted_pieces in pieces.items():
            fetch = self._transfer(device).from_disk(merged(wanted_pieces), self._files.reader)
            try:
                fetch.wait()
            finally:
                fetch.cancel()
                fetch.wait_host()

    def _read(
        self,
        tensor: DiskTensor,
        device: torch.device,
        dtype: torch.dtype | None,
        pieces: dict[torch.device, list[Piece]],
    ) -> torch.Tensor:
        """A disk home's values: read by all reader threads later, or here where they are cast."""
        values = tensor._overspill_values
        if values.memory is not None or dtype not in (None, values.spec.dtype) or not values.spec.numel:
            return _cast(values.read(), device, dtype)
        target = values.spec.empty(device)
        pieces.setdefault(device, []).extend(pieces_of(values, values.spec.flat(target).view(torch.uint8)))
        return target

    def _stage_host(self, placements: Sequence[Placement]) -> None:
        mapped = files_in_memory() if any(placement.device != CPU for placement in placements) else []
        in_place = [
            placement
            for placement in placements
            if placement.device != CPU and all(self._can_be_pinned(name, mapped) for name in placement.unit.tensors)
        ]
        large = [tensor for p in in_place for tensor in self._tensors(p.unit) if tensor.nbytes >= ALONE_ON_ITS_PAGES]
        pinned = PinnedRanges([ordinary(tensor) for tensor in large])
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for placement in placements:
            tensors = [ordinary(tensor) for tensor in self._tensors(placement.unit)]
            layout = Layout.of([TensorSpec.laid_out_as(tensor) for tensor in tensors])
            if placement in in_place:
                store = HostStore.in_place(layout, tensors, pinned)
            else:
                store = HostStore.fresh(layout)
                copies += self._fill(store, tensors, placement.device)
            self._staged.stores.append((placement, store))
            self._transfer(placement.device)
        copy_bytes(copies)
        for placement, staged in self._staged.stores:
            if isinstance(staged, HostStore):
                staged.pin(placement.device)

    @staticmethod
    def _fill(
        store: HostStore, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy `tensors` to a fresh store; but return those in host memory, for all of which there is a faster way."""
        if any(tensor.device != CPU for tensor in tensors):  # a copy from there is fast to pinned memory only
            store.touch(device)
            store.pin(device)
        left = []
        for index, tensor in enumerate(tensors):
            if tensor.device == CPU and is_dense(tensor):
                left.append((store.target(index), tensor))
            else:
                store.target(index).copy_(tensor)
        return left

    def _can_be_pinned(self, name: str, mapped: Sequence[tuple[int, int]]) -> bool:
        """Whether a tensor is in host memory that can be pinned where it is."""
        tensor = self.groups[name].tensor
        if tier_of(tensor) is not Tier.DEVICE or tensor.device != CPU or not is_dense(tensor):
            return False
        address = tensor.data_ptr()
        return not any(start <= address < end for start, end in mapped)

    def _stage_edited(self, placements: Sequence[Placement]) -> None:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for placement in placements:
            tensors = [ordinary(tensor) for tensor in self._tensors(placement.unit)]
            store = FileStore.fresh(Layout.of([TensorSpec.laid_out_as(tensor) for tensor in tensors]))
            copies += self._fill(store, tensors, placement.device)
            self._staged.stores.append((placement, store))
            self._transfer(placement.device)
        copy_bytes(copies)

    def _stage_disk(self, placements: Sequence[Placement], folder: str | os.PathLike[str] | None) -> None:
        written = {
            placement.unit.name: tensors
            for placement in placements
            if (tensors := [self._to_write(name) for name in placement.unit.tensors if not self._is_on_disk(name)])
        }
        spans: dict[str, Sequence[FileSpan]] = {}
        if written:
            # A folder that a part of this model writes to is this model's.
            files = next((manager.files for manager in self._managers if manager.files.has(folder)), self._files)
            self._staged.bundles = files.write(written, folder, fingerprint=_fingerprint(self.groups))
        for bundle, tensors in zip(self._staged.bundles, written.values(), strict=True):
            spans |= {tensor.name: _spans(bundle, tensor) for tensor in tensors}
        for placement in placements:
            values = [self._disk_values(name, spans) for name in placement.unit.tensors]
            layout = Layout.of([each.spec for each in values])
            self._staged.stores.append((placement, DiskStore(layout, values, self._files.reader)))
            self._transfer(placement.device)

    def _is_on_disk(self, name: str) -> bool:
        """Whether its values are in a file already, and nowhere else."""
        tensor = self.groups[name].tensor
        return isinstance(tensor, DiskTensor) and tensor._overspill_values.memory is None

    def _disk_values(self, name: str, spans: Mapping[str, Sequence[FileSpan]]) -> DiskValues:
        tensor = self.groups[name].tensor
        if isinstance(tensor, DiskTensor) and name not in spans:
            return tensor._overspill_values
        return DiskValues(name, TensorSpec.laid_out_as(tensor), spans[name], self._files.reader)

    def _to_write(self, name: str) -> BundleTensor:
        tensor = self.groups[name].tensor
        spec = TensorSpec.laid_out_as(tensor)
        return BundleTensor(name, spec, spec.strides, lambda: spec.flat(ordinary(tensor)).to(CPU).view(torch.uint8))

    def _tensors(self, unit: Unit) -> list[torch.Tensor]:
        return [self.groups[name].tensor for name in unit.tensors]

    def _transfer(self, device: torch.device) -> Transfer:
        if device not in self._transfers:
            self._transfers[device] = Transfer(device)
        return self._transfers[device]

    def _check_room(self, wanted: Mapping[str, tuple[torch.device, torch.dtype | None]]) -> None:
        """Before anything is allocated: what comes to each device must fit there."""
        needed: dict[torch.device, int] = {}
        for name, (device, dtype) in wanted.items():
            tensor = self.groups[name].tensor
            if tier_of(tensor) is Tier.DISK or tensor.device != device:
                spec = TensorSpec.of(tensor).cast(dtype)
                needed[device] = needed.get(device, 0) + spec.nbytes
        for device, nbytes in needed.items():
            if nbytes > (free := free_memory(device)):
                raise BudgetError(
                    f"this needs {format_size(nbytes)} on {device}, where {format_size(free)} are free. "
                    "Name fewer modules, or another device"
                )

    def written(self) -> list[Path]:
        """The files that were staged."""
        return [bundle.file.path for bundle in self._staged.bundles]

    def abandon(self) -> None:
        """Remove what was staged on disk."""
        used = _files_of(unit for _, unit in self._streamed)
        for files in {self._files, *(manager.files for manager in self._managers)}:
            files.forget(used, delete=True)

    # The last step.

    def commit(
        self,
        *,
        windows: Mapping[torch.device, int] | None = None,
        delete: bool = False,
        training: Training | None = None,
    ) -> None:
        """Let the model be what was staged. `windows`: memory held for streaming; else it is taken for calls only."""
        staged = self._staged
        moved = {id(tensor) for placement, _ in staged.stores for tensor in self._tensors(placement.unit)}
        moved |= {id(tensor) for tensor, _ in staged.plain}
        held = self._held_windows() if windows is None else windows
        kept = [(self._narrowed(placement, at), unit, at) for placement, unit, at in self._untouched(moved)]
        placements = [*(placement for placement, _, _ in kept), *(placement for placement, _ in staged.stores)]
        taken = {  # the last thing that may fail
            device: Window(nbytes, device, streams=self._transfer(device).streams, held=device in held)
            for device, nbytes in _window_sizes(placements, held).items()
        }
        remove_old = [manager.detach() for manager in self._managers]
        for manager in self._managers:
            if manager.files is not self._files:
                self._files.take_over(manager.files)
        streamed: list[tuple[Placement, StreamedUnit]] = []
        for placement, unit, indices in kept:
            whole = len(indices) == len(unit.store.homes)
            streamed.append((placement, unit.again() if whole else unit.part(indices)))
        for placement, store in staged.stores:
            tensors = self._tensors(placement.unit)
            for tensor in tensors if self.remembers else ():
                if tier_of(tensor) is Tier.DEVICE:
                    self._origins.setdefault(id(tensor), Origin.of(tensor))
            store.move_in(tensors)
            places = [self.groups[name].places for name in placement.unit.tensors]
            streamed.append((placement, StreamedUnit(placement.unit.name, store, places, placement.device, kept=False)))
        self._commit_plain()
        staged.plain.clear()
        let_go()
        self._refresh()
        self._files.forget(_files_of(unit for _, unit in streamed), delete=delete)
        if streamed or training is not None:
            self._manage(streamed, taken, training)
        for remove in remove_old:
            remove()

    def _commit_plain(self) -> None:
        for tensor, values in self._staged.plain:
            home = tier_of(tensor) is not Tier.DEVICE
            origin = self._origins.pop(id(tensor), None) if home else None
            if not home and values.device != tensor.device and self.remembers:
                self._origins.setdefault(id(tensor), Origin.of(tensor))
            turn_into_plain(tensor, values, _kind_of(tensor, origin))
            if (kept := self._origins.get(id(tensor))) is not None and kept.device == values.device:
                del self._origins[id(tensor)]  # it is back where it was

    def _refresh(self) -> None:
        for module in {place.module for group in self.groups.values() for place in group.places}:
            refresh_flat_weights(module)
            if isinstance(module, nn.RNNBase) and all(map(_is_plain, module.parameters())):
                module.flatten_parameters()  # one chunk of memory again, where the device's kernels want that

    def _held_windows(self) -> dict[torch.device, int]:
        """The memory that is held for streaming now."""
        held: dict[torch.device, int] = {}
        for window in (window for manager in self._managers for window in manager.windows.values()):
            if window.held:
                held[window.device] = max(window.nbytes, held.get(window.device, 0))
        return held

    def _untouched(self, moved: Collection[int]) -> Iterator[tuple[Placement, StreamedUnit, list[int]]]:
        """What streams already and is not moved: units, or the rest of them."""
        for placement, unit in self._streamed:
            # What the user has put another tensor in the place of is no part of the model any more.
            here = [id(home) in self._names and id(home) not in moved for home in unit.store.homes]
            indices = [index for index, stays in enumerate(here) if stays]
            if indices:
                yield placement, unit, indices

    def _narrowed(self, placement: Placement, indices: Sequence[int]) -> Placement:
        """The placement of some of a unit's tensors."""
        unit = placement.unit
        if len(indices) == len(unit.tensors):
            return placement
        tensors = tuple(unit.tensors[index] for index in indices)
        nbytes = Layout.of([TensorSpec.of(self.groups[name].tensor) for name in tensors]).nbytes
        compute = unit.compute * nbytes / max(unit.nbytes, 1)
        rest = Unit(name=unit.name, roots=unit.roots, tensors=tensors, nbytes=nbytes, compute=compute)
        return Placement(unit=rest, tier=placement.tier, device=placement.device)

    def _manage(
        self,
        streamed: list[tuple[Placement, StreamedUnit]],
        windows: Mapping[torch.device, Window],
        training: Training | None,
    ) -> None:
        streamed = _named_apart(streamed)
        placements = [placement for placement, _ in streamed]
        plan = describe(self.model, placements, windows) if placements else self._nothing_streamed()
        for placement, unit in streamed:
            unit.kept = placement.unit.name in plan.kept
        units = {placement.unit.name: unit for placement, unit in streamed}
        Managed(
            self.model, plan, units, self._transfers, windows, self._files, self._origins, self._stored_as, training
        )

    def _nothing_streamed(self) -> Plan:
        """The plan of a model that is left where it is."""
        device = next((group.tensor.device for group in self.groups.values()), CPU)
        return Plan(
            placements=(),
            stays=tuple(self.groups),
            stays_nbytes=sum(group.spec.nbytes for group in self.groups.values()),
            device=device,
            windows={},
            budgets={},
            headroom={},
            rates=Rates.assumed(device),
            dtype=None,
        )


def _window_sizes(placements: Sequence[Placement], held: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """What each device needs to stream these: what is held for that in any case, else room for three units."""
    units: dict[torch.device, list[Unit]] = {}
    for placement in placements:
        units.setdefault(placement.device, []).append(placement.unit)
    return {
        device: max(held[device], least_window(mine)) if device in held else usual_window(mine)
        for device, mine in units.items()
    }


def describe(model: nn.Module, streamed: Sequence[Placement], windows: Mapping[torch.device, Window]) -> Plan:
    """The plan that a model with these streamed units follows, with all that is resident in it."""
    groups = tensor_groups(model)
    roots = {root for placement in streamed for root in placement.unit.roots}
    away = {name for placement in streamed for name in placement.unit.tensors}
    resident = [
        name
        for name, group in groups.items()
        if name not in away
        and group.kind == "parameter"
        and not group.tensor.is_meta
        and not any(is_below(owner_path(place), root) for place in group.places for root in roots)
    ]
    units = [unit for unit in cut_out(model, [""], resident).units if unit.roots]
    placements = [
        *streamed,
        *(Placement(unit=u, tier=Tier.DEVICE, device=groups[u.tensors[0]].tensor.device) for u in units),
    ]
    placed = away | {name for unit in units for name in unit.tensors}
    stays = tuple(name for name in groups if name not in placed)
    devices = list(dict.fromkeys(placement.device for placement in streamed))
    main = next((device for device in devices if device != CPU), devices[0])
    order = {name: position for position, name in enumerate(groups)}
    return Plan(
        placements=tuple(sorted(placements, key=lambda placement: order[placement.unit.tensors[0]])),
        stays=stays,
        stays_nbytes=sum(groups[name].spec.nbytes for name in stays),
        device=main,
        windows={device: window.nbytes for device, window in windows.items()},
        budgets={},
        headroom={},
        rates=Rates.of(main),
        dtype=None,
    )


def _below(path: str, unit: Unit) -> Unit:
    """A unit of a part of a model, by the names that it has in the model."""
    if not path:
        return unit

    def full(name: str) -> str:
        return f"{path}.{name}" if name else path

    return replace(
        unit, name=full(unit.name), roots=tuple(map(full, unit.roots)), tensors=tuple(map(full, unit.tensors))
    )


def _named_apart(streamed: list[tuple[Placement, StreamedUnit]]) -> list[tuple[Placement, StreamedUnit]]:
    """No two units of one name: what is left of a unit and what was moved of it have the same root."""
    taken: set[str] = set()
    result = []
    for placement, unit in streamed:
        name = placement.unit.name if placement.unit.name not in taken else placement.unit.tensors[0]
        taken.add(name)
        unit.name = name
        result.append((replace(placement, unit=replace(placement.unit, name=name)), unit))
    return result


def _is_plain(tensor: torch.Tensor) -> bool:
    return tier_of(tensor) is Tier.DEVICE


def _holds(unit: StreamedUnit, tensor: torch.Tensor) -> bool:
    return any(home is tensor for home in unit.store.homes)


def _files_of(units: Iterable[StreamedUnit]) -> set[SourceFile]:
    return {file for unit in units for file in unit.store.files()}


def _cast(values: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return values.to(device, dtype if dtype is not None and values.is_floating_point() else values.dtype)


def _kind_of(tensor: torch.Tensor, origin: Origin | None) -> type[torch.Tensor]:
    """The class of an ordinary tensor in the place of this one, which may be ordinary already."""
    if tier_of(tensor) is Tier.DEVICE:
        return type(tensor)
    return plain_kind(tensor) if origin is None else origin.kind


def _spans(bundle: Bundle, tensor: BundleTensor) -> list[FileSpan]:
    return [FileSpan(bundle.file, bundle.offsets[tensor.name], tensor.spec.nbytes)] if tensor.spec.nbytes else []


def _fingerprint(groups: Mapping[str, TensorGroup]) -> str:
    """Tells one model's files from another's."""
    digest = hashlib.sha256()
    for name, group in groups.items():
        digest.update(f"{name} {group.spec}\n".encode())
    return digest.hexdigest()[:32]


def refuse(names: Sequence[str], what: str) -> None:
    """Raise a StateError about the first of `names`, if there are any."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise StateError(f"{', '.join(names[:3])}{more}: {what}")
