"""From a checkpoint to a model that runs: every tensor straight to its tier, nothing twice, nothing half done.

Everything is built aside. The model is touched in the last step only, so a failure leaves it as it was.
"""

import hashlib
import os
from collections.abc import Mapping

import torch
from torch import nn

from overspill.checkpoint.conversion import ConvertedTensor, chunks_of
from overspill.checkpoint.index import FileSpan, SourceFile
from overspill.checkpoint.reader import FileReader
from overspill.checkpoint.writer import write_all
from overspill.devices import buffer_of, reserve
from overspill.files import Files
from overspill.homes import DiskValues
from overspill.managed import Managed
from overspill.matching import Match
from overspill.offload_folder import OffloadFolder, padded
from overspill.plan import Placement, Plan, Tier
from overspill.progress import Progress
from overspill.slab import Layout, Window
from overspill.store import DiskStore, HostStore, merged
from overspill.streamed import StreamedUnit, refresh_flat_weights, table_of
from overspill.tensors import TensorGroup, TensorSpec
from overspill.transfer import Piece, Transfer


class Loader:
    """One load: what goes where, and what has been built so far."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        groups: Mapping[str, TensorGroup],
        matches: Mapping[str, Match],
        *,
        folder: str | os.PathLike[str] | None,
        progress: bool,
    ) -> None:
        self._model, self._plan, self._groups, self._matches = model, plan, groups, matches
        self._reader = FileReader()
        self._transfers = {device: Transfer(device) for device in plan.devices}
        self._pieces: dict[torch.device, list[Piece]] = {device: [] for device in self._transfers}
        self._hosts: list[tuple[HostStore, torch.device]] = []
        self._units: dict[str, StreamedUnit] = {}
        self._homes: dict[str, torch.Tensor] = {}
        self._progress = progress
        self._parent = folder
        self._folder: OffloadFolder | None = None
        self._converted: dict[str, FileSpan] = {}
        self._scattered: list[tuple[ConvertedTensor, torch.Tensor]] = []

    def run(self) -> Managed:
        """Do it, or leave the model as it was."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._convert()
                for device in self._transfers:
                    reserve(self._plan.bytes_on(device) - self._plan.windows.get(device, 0), device)
                for placement in self._plan.placements:
                    self._prepare(placement)
                self._prepare_stays()
                self._read()
                for store, device in self._hosts:
                    store.pin(device)
                return self._commit()
        except BaseException:
            if self._folder is not None:
                self._folder.remove()
            raise

    # Building aside.

    def _prepare(self, placement: Placement) -> None:
        names = placement.unit.tensors
        if placement.tier is Tier.DEVICE:
            for name in names:
                self._prepare_resident(name, placement.device)
            return
        likes = [self._groups[name].tensor for name in names]
        layout = Layout.of([self._spec(name) for name in names])
        store: HostStore | DiskStore
        if placement.tier is Tier.CPU:
            store = HostStore.fresh(layout)
            self._hosts.append((store, placement.device))
            for index, name in enumerate(names):
                self._fill(name, store.target(index), placement.device)
        else:
            store = DiskStore(layout, [self._on_disk(name) for name in names], self._reader)
        store.make_homes(likes)
        self._homes.update(zip(names, store.homes, strict=True))
        if placement.unit.roots:
            places = [self._groups[name].places for name in names]
            name = placement.unit.name
            kept = name in self._plan.kept
            self._units[name] = StreamedUnit(name, store, places, placement.device, kept=kept)

    def _prepare_stays(self) -> None:
        """Small tensors live where the module that owns them computes."""
        for name in self._plan.stays:
            self._prepare_resident(name, self._plan.device_of(name))

    def _prepare_resident(self, name: str, device: torch.device) -> None:
        group = self._groups[name]
        if name not in self._matches:  # not stored: it keeps the values it has
            values = group.tensor.detach().to(device)
        else:
            spec = self._spec(name)
            values = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            self._fill(name, values, device)
        self._homes[name] = _plain(values, group.tensor)

    def _fill(self, name: str, target: torch.Tensor, device: torch.device) -> None:
        """Have `target` filled with the stored values, or with those that the model holds."""
        if name not in self._matches:
            target.copy_(self._groups[name].tensor.detach())
            return
        match = self._matches[name]
        if target.numel() == 0:
            return
        if match.stored.spans is None:
            self._scattered.append((match.stored, target))
            return
        dtype = match.stored.spec.dtype
        flat = target.view(-1) if match.is_cast else target.view(-1).view(torch.uint8)
        dtype = dtype if match.is_cast else torch.uint8
        reached = 0
        for span in match.stored.spans:
            count = span.nbytes // dtype.itemsize
            self._pieces[device].append(Piece(span.file, span.offset, dtype, flat[reached : reached + count]))
            reached += count

    def _spec(self, name: str) -> TensorSpec:
        return self._matches[name].spec if name in self._matches else self._groups[name].spec

    # The disk tier: referenced where it lies, converted only where the bytes in memory are others.

    def _convert(self) -> None:
        """Write what rests on disk in another form to a file of our own, once; a few megabytes at a time."""
        on_disk = (placement.unit for placement in self._plan.placements if placement.tier is Tier.DISK)
        names = [name for unit in on_disk for name in unit.tensors]
        matches = {name: self._matches[name] for name in names if name in self._matches}
        others = {name: match for name, match in matches.items() if match.is_converted}
        if not others:
            return
        nbytes = sum(padded(match.spec.nbytes) for match in others.values())
        self._folder = OffloadFolder(self._parent, fingerprint=_fingerprint(others), nbytes=nbytes)
        offsets = {}
        with self._folder.open() as file:
            for name, match in others.items():
                offsets[name] = padded(file.tell())
                with self._folder.writing(name):
                    file.seek(offsets[name])
                    for chunk in chunks_of(match.stored, self._reader):
                        cast = chunk.to(match.spec.dtype)  # held by name: the buffer does not hold it
                        write_all(file, buffer_of(cast))
        written = SourceFile.at(self._folder.tensors)
        for name, match in others.items():
            self._converted[name] = FileSpan(written, offsets[name], match.spec.nbytes)

    def _on_disk(self, name: str) -> DiskValues:
        if name not in self._matches:
            values = DiskValues(name, self._spec(name), (), self._reader)
            values.replace(self._groups[name].tensor.detach())
            return values
        match = self._matches[name]
        spans = (self._converted[name],) if name in self._converted else match.stored.spans
        assert spans is not None
        return DiskValues(name, match.spec, spans, self._reader)

    # Reading, and the last step.

    def _read(self) -> None:
        fetches = [
            self._transfers[device].from_disk(merged(pieces), self._reader) for device, pieces in self._pieces.items()
        ]
        total = sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)
        try:
            with Progress(total, self._progress) as bar:
                while not all(fetch.wait_some(0.05) for fetch in fetches):
                    bar.show(sum(fetch.nbytes_done for fetch in fetches))
                bar.show(sum(fetch.nbytes_done for fetch in fetches))
            for fetch in fetches:
                fetch.wait()
        finally:
            for fetch in fetches:
                fetch.cancel()
                fetch.wait_host()  # no thread may write to memory that a failed load gives up
        self._pieces.clear()
        for stored, target in self._scattered:
            stored.fill(target, self._reader)

    def _commit(self) -> Managed:
        windows = {
            device: Window(nbytes, device, streams=self._transfers[device].streams)
            for device, nbytes in self._plan.windows.items()
        }
        for name, home in self._homes.items():
            for place in self._groups[name].places:
                table_of(place)[place.name] = home
                refresh_flat_weights(place.module)
        stored_as = {id(self._homes[name]): match.stored.name for name, match in self._matches.items()}
        files = Files(self._folder)
        return Managed(self._model, self._plan, self._units, self._transfers, windows, files, stored_as=stored_as)


def _plain(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An ordinary parameter or buffer in the place of `like`."""
    if not isinstance(like, nn.Parameter):
        return values
    parameter = nn.Parameter(values, like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter


def _fingerprint(matches: Mapping[str, Match]) -> str:
    """Tells one model's converted tensors from another's."""
    digest = hashlib.sha256()
    for name, match in matches.items():
        stored = match.stored
        digest.update(f"{name} {match.spec} {stored.files} {stored.spans}\n".encode())
    return digest.hexdigest()[:16]
