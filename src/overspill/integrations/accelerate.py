"""A model that Accelerate has dispatched: where each of its tensors really is, and how to take Accelerate off it.

Note: what a dispatched model carries. A module that Accelerate touched has `_hf_hook`, `_old_forward` and a `forward`
that calls the first around the second. Placement is the work of `AlignDevicesHook`; a `SequentialHook` holds several.
Where its `offload` is set, the truth about the module's parameters (its persistent buffers too with `offload_buffers`,
its submodules' with `place_submodules`) is in its `weights_map`, and whatever the module shows is thrown away at the
next call: meta tensors, or what an interrupted call has left. Everywhere else the module shows the truth. A weights map
is a plain dict of tensors, or an `OffloadedWeightsLoader` whose `state_dict` holds tensors and whose `index` names
files, mostly behind a `PrefixedDataset` that puts the module's path before each name. The root also has `to` and `cuda`
that warn, and `hf_device_map`, which generation, pipelines and PEFT read.

Note: ties. A tensor that hung at two places becomes two meta tensors when both are offloaded. What is left of the tie:
the two share memory or bytes of a file, or Transformers lists them in `all_tied_weights_keys`, or their hooks list them
in `tied_params_names` (without saying which belong together). The latter two only say that they were tied once; if the
values are stored twice then, they are one tensor if the bytes are equal, since Transformers leaves apart what differs.
"""

import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn

from overspill.checkpoint import CheckpointIndex, SourceFile, open_checkpoint
from overspill.checkpoint.index import FileSpan
from overspill.checkpoint.reader import FileReader
from overspill.config import MIB
from overspill.devices import CPU, buffer_of, compute_device
from overspill.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError, StateError
from overspill.tensors import Place, TensorGroup, TensorSpec, tensor_groups

SUPPORTED = {"accelerate": "1.10 to 1.15", "transformers": "5.17 to 5.22"}
"""The versions that are known to be as the notes above say. Others are read all the same, and refused where a hook is
built otherwise."""

_HOOK_PARTS = "execution_device offload offload_buffers place_submodules tied_params_map tied_params_names weights_map"
_COMPARED_AT_ONCE = 16 * MIB


@dataclass(frozen=True, eq=False)
class Dispatched:
    """One tensor of the model, as Accelerate holds it."""

    name: str
    where: Literal["device", "cpu", "disk"]
    tensor: torch.Tensor | None
    """The module's own tensor, or the one in Accelerate's weights map: never a copy. None on disk."""
    spans: tuple[FileSpan, ...]
    """The bytes on disk, in row-major order. Empty elsewhere."""
    stored_dtype: torch.dtype
    dtype: torch.dtype
    """What the model computes with."""
    execution_device: torch.device


class Dispatch(Mapping[str, Dispatched]):
    """Every tensor that a dispatched model shows, by its first path, and the ties among them.

    `ties` lists the paths that showed one tensor before Accelerate took it apart; the first comes first in the model.
    All of them have the same values here: those that are nearest to the device.
    """

    def __init__(self, tensors: Mapping[str, Dispatched], ties: list[list[str]]) -> None:
        self._tensors = dict(tensors)
        self.ties = ties

    def __getitem__(self, name: str) -> Dispatched:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def is_dispatched(model: nn.Module) -> bool:
    """Whether a module of `model` carries a hook of Accelerate's own."""
    return any(_is_accelerates(hook) for module in model.modules() for hook in _hooks_of(module))


def execution_device(model: nn.Module) -> torch.device:
    """Where the first module that has tensors of its own computes."""
    devices = _execution_devices(model)
    for module in model.modules():
        tensor = next(itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False)), None)
        if tensor is not None:
            return devices.get(id(module)) or (CPU if tensor.is_meta else tensor.device)
    return CPU


def read_dispatch(model: nn.Module) -> Dispatch:
    """Where every parameter and buffer of `model` is. Changes nothing.

    Reads headers only; but where tensors that were tied are stored twice, their bytes, to see whether they still are
    one. Raises StateError for what cannot be adopted, and CheckpointError's subclasses for files that are not as
    Accelerate left them.
    """
    _check_hooks(model)
    groups = tensor_groups(model)
    survey = _Survey(model)
    bonds = _Bonds(groups, {name: survey.locate(group) for name, group in groups.items()})
    bonds.join_what_shares_memory()
    for source, tied in _listed_ties(model, groups):
        bonds.join(source, tied, lend=True)
    for first, second in itertools.combinations(survey.known_as_tied(groups), 2):
        bonds.join(first, second)
    return Dispatch(bonds.settled(), bonds.ties())


def remove_dispatch(model: nn.Module) -> Callable[[], None]:
    """Take Accelerate off `model`: its hooks, wrapped forwards and warnings. Moves, loads and casts no tensor.

    Hooks of the user's own stay, and so does `hf_device_map`. Returns a function that puts all of it back as it was.
    """
    _check_hooks(model)
    edits: list[Callable[[], None]] = []

    def undo() -> None:
        while edits:
            edits.pop()()

    for module in model.modules():
        _remove_hooks(module, edits)
        _remove_warnings(module, edits)
    return undo


# Hooks.


def _hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of `module` itself, one after the other."""
    # Not by getattr: a wrapper such as torch.compile's shows the attributes of the module inside.
    hook = module.__dict__.get("_hf_hook")
    return [] if hook is None else list(_flattened(hook))


def _flattened(hook: Any) -> Iterator[Any]:
    library = sys.modules.get("accelerate.hooks")  # a hook of its cannot exist before it was imported
    if library is not None and isinstance(hook, library.SequentialHook):
        for inner in hook.hooks:
            yield from _flattened(inner)
    else:
        yield hook


def _is_accelerates(hook: Any) -> bool:
    library = sys.modules.get("accelerate.hooks")
    own = () if library is None else (library.AlignDevicesHook, library.CpuOffload, library.LayerwiseCastingHook)
    return isinstance(hook, own)


def _is_placement(hook: Any) -> bool:
    return _is_accelerates(hook) and isinstance(hook, sys.modules["accelerate.hooks"].AlignDevicesHook)


def _placements(module: nn.Module) -> Iterator[Any]:
    return filter(_is_placement, _hooks_of(module))


def _check_hooks(model: nn.Module) -> None:
    """Refuse, by name, what cannot be adopted."""
    for path, module in model.named_modules():
        for hook in filter(_is_accelerates, _hooks_of(module)):
            what = f"{path or 'the model'} carries Accelerate's {type(hook).__name__}"
            if isinstance(hook, sys.modules["accelerate.hooks"].CpuOffload):
                raise StateError(
                    f"{what}, which moves all of it whenever the hook that cpu_offload_with_hook returned says so. "
                    "Call remove() of that hook first: the model is an ordinary one then"
                )
            if not _is_placement(hook):
                raise StateError(
                    f"{what}, which casts its weights at each call, so that they have no dtype to adopt. Take it off "
                    "with accelerate.hooks.remove_hook_from_submodules first"
                )
            if missing := [part for part in _HOOK_PARTS.split() if not hasattr(hook, part)]:
                raise StateError(
                    f"{what} without {', '.join(missing)}: this Accelerate is built otherwise than those that "
                    f"overspill knows. Install accelerate {SUPPORTED['accelerate']}"
                )


def _execution_devices(model: nn.Module) -> dict[int, torch.device]:
    """By the module's id: where its hook sends its inputs, or that of the nearest module around it."""
    by_path: dict[str, torch.device | None] = {}
    devices: dict[int, torch.device] = {}
    for path, module in model.named_modules():
        device = by_path.get(path.rpartition(".")[0])
        for hook in _placements(module):
            if hook.execution_device is not None:
                device = compute_device(hook.execution_device)
        by_path[path] = device
        if device is not None:
            devices[id(module)] = device
    return devices


@dataclass(frozen=True)
class _Slot:
    """An entry of a module's tables that a hook offloads; its weights map knows it by `key`."""

    hook: Any
    key: str


def _offloaded_slots(model: nn.Module) -> dict[tuple[int, str], _Slot]:
    """By the module's id and the entry's name."""
    slots = {}
    for module in model.modules():  # parents first, so that the innermost hook has the last word, as it has in a call
        for hook in _placements(module):
            if not hook.offload:
                continue
            inside = module.named_modules(remove_duplicate=False) if hook.place_submodules else [("", module)]
            for path, owner in inside:
                prefix = f"{path}." if path else ""
                for name in _offloadable(owner, hook.offload_buffers):
                    slots[id(owner), name] = _Slot(hook, prefix + name)
    return slots


def _offloadable(module: nn.Module, with_buffers: bool) -> Iterator[str]:
    yield from module._parameters
    if with_buffers:
        yield from (name for name in module._buffers if name not in module._non_persistent_buffers_set)


# Where the values are.


@dataclass(frozen=True)
class _Entry:
    """What an offload index says about `key`. Anybody may have written it: nothing in it is believed."""

    key: str
    about: Mapping[str, Any]
    folder: str | None

    @classmethod
    def of(cls, index: object, key: str, folder: str | None) -> "_Entry | None":
        """None if the index has nothing about `key`."""
        if not isinstance(index, Mapping):
            raise CheckpointCorruptError(f"{_index_in(folder)} is not a table of tensors. Load the model again")
        if key not in index:
            return None
        about = index[key]
        if not isinstance(about, Mapping):
            raise CheckpointCorruptError(
                f"{_index_in(folder)} says {about!r} of {key}, which is not a table with its dtype and shape. "
                "Load the model again"
            )
        return cls(key, about, folder)

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, str(self.about.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise self._wrong("dtype", "which torch does not have")
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.about.get("shape")
        if not isinstance(shape, list | tuple) or not all(type(size) is int for size in shape):
            raise self._wrong("shape", "which is not a list of sizes")
        return tuple(shape)

    @property
    def safetensors_file(self) -> str | None:
        """None: the tensor has a file of its own in the folder."""
        file = self.about.get("safetensors_file")
        if file is not None and not isinstance(file, str):
            raise self._wrong("safetensors_file", "which is not a path")
        return file

    @property
    def weight_name(self) -> str:
        name = self.about.get("weight_name", self.key)
        if not isinstance(name, str):
            raise self._wrong("weight_name", "which is not a name")
        return name

    def _wrong(self, field: str, why: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{_index_in(self.folder)} gives {self.key} the {field} {self.about.get(field)!r}, {why}. "
            "Load the model again"
        )


def _index_in(folder: str | None) -> str:
    return "Accelerate's offload index" + ("" if folder is None else f" {Path(folder).absolute() / 'index.json'}")


def _look_up(slot: _Slot) -> torch.Tensor | _Entry | None:
    """What the hook's weights map has, without loading it. None if it has nothing."""
    from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset

    key, values = slot.key, slot.hook.weights_map
    while isinstance(values, PrefixedDataset):
        key, values = f"{values.prefix}{key}", values.dataset
    index: object = {}
    folder = None
    if isinstance(values, OffloadedWeightsLoader):
        index, folder, values = values.index, values.save_folder, values.state_dict
    if not isinstance(values, dict):
        raise StateError(
            f"{key} is kept in a weights map of type {type(values).__name__}, which overspill cannot look into. "
            "Give Accelerate a plain dict of tensors, or a folder"
        )
    if key in values:
        return None if values[key].is_meta else values[key]
    return _Entry.of(index, key, folder)


class _Survey:
    """Finds the values of one tensor after the other; each file's header is read once."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = _offloaded_slots(model)
        self._devices = _execution_devices(model)
        hooks = itertools.chain.from_iterable(map(_placements, model.modules()))
        maps = [hook.tied_params_map for hook in hooks if hook.tied_params_map]
        self._tied = {id(tensor) for tied in maps for copies in tied.values() for tensor in copies.values()}
        self._files: dict[str, CheckpointIndex] = {}
        # Transformers' patterns of names, and the dtypes that these get in a model of a given dtype.
        plans = (getattr(module, "_get_dtype_plan", None) for module in model.modules())
        self._dtype_plan: Callable[[torch.dtype], dict[str, torch.dtype]] = functools.cache(
            next(filter(None, plans), lambda dtype: {})
        )

    def locate(self, group: TensorGroup) -> Dispatched | None:
        """The values of `group` that are nearest to the device; None if there are none."""
        return _nearest(self._locate_at(place, group.tensor, group.name) for place in group.places)

    def known_as_tied(self, groups: Mapping[str, TensorGroup]) -> list[str]:
        """The names of those that a hook knows to be tied, to whatever it may be."""

        def is_known(group: TensorGroup) -> bool:
            slots = (self._slots.get((id(place.module), place.name)) for place in group.places)
            return id(group.tensor) in self._tied or any(slot is not None and _knows_as_tied(slot) for slot in slots)

        return [name for name, group in groups.items() if is_known(group)]

    def _locate_at(self, place: Place, shown: torch.Tensor, name: str) -> Dispatched | None:
        slot = self._slots.get((id(place.module), place.name))
        values = None if slot is None else _look_up(slot)
        if values is None:
            return None if shown.is_meta else self._in_memory(place, shown, shown, name)
        if type(shown) not in (torch.Tensor, nn.Parameter):
            raise StateError(
                f"{name} is offloaded and a {type(shown).__name__}, which only Accelerate knows how to put together. "
                "Map its module to a device in the device_map, or load the model without quantization"
            )
        if isinstance(values, torch.Tensor):
            return self._in_memory(place, values, shown, name)
        return self._on_disk(place, values, shown, name)

    def _in_memory(self, place: Place, values: torch.Tensor, shown: torch.Tensor, name: str) -> Dispatched:
        _check_shape(name, tuple(values.shape), shown, "Accelerate's weights map")
        device = self._devices.get(id(place.module), values.device)
        # A module's own tensor is where it computes, unless it was added after the dispatch.
        waits_on_host = values.device == CPU and (values is not shown or device != CPU)
        return Dispatched(name, "cpu" if waits_on_host else "device", values, (), values.dtype, shown.dtype, device)

    def _on_disk(self, place: Place, entry: _Entry, shown: torch.Tensor, name: str) -> Dispatched:
        file = entry.safetensors_file
        stored, span = _in_own_file(entry) if file is None else self._in_safetensors(entry, file)
        _check_shape(name, stored.shape, shown, str(span.file.path))
        cast = file is not None and "dtype" in entry.about
        dtype = self._dtype_if_loaded(name, entry, stored.dtype, shown.dtype) if cast else shown.dtype
        device = self._devices.get(id(place.module), CPU)
        return Dispatched(name, "disk", None, (span,), stored.dtype, dtype, device)

    def _in_safetensors(self, entry: _Entry, file: str) -> tuple[TensorSpec, FileSpan]:
        if file not in self._files:
            self._files[file] = open_checkpoint(file)
        stored = self._files[file].get(entry.weight_name)
        if stored is None:
            raise CheckpointMismatchError(
                f"{file} does not hold {entry.key} any more, which Accelerate reads from there. Load the model again"
            )
        return stored.spec, FileSpan(stored.file, stored.offset, stored.nbytes)

    def _dtype_if_loaded(self, name: str, entry: _Entry, stored: torch.dtype, shown: torch.dtype) -> torch.dtype:
        """The dtype that Transformers would have given the tensor, had it loaded it instead of leaving it on disk.

        That is float32 for what a model keeps in float32, although the placeholder has the model's dtype.
        """
        for pattern, dtype in self._dtype_plan(shown).items():
            if re.search(pattern.replace("*", ".*"), entry.key):
                return dtype
        if entry.dtype not in (stored, shown) and not _holds(entry.dtype, stored):
            raise StateError(
                f"{name} is stored as {stored}, was loaded as {entry.dtype} and cast to {shown} after that, which "
                f"rounds twice. Load the model again with dtype={shown}"
            )
        return shown


def _knows_as_tied(slot: _Slot) -> bool:
    # Hooks tell tied tensors by their addresses. Null is that of every meta tensor: older versions take all for tied
    # as soon as two were.
    return slot.key in slot.hook.tied_params_names and 0 not in (slot.hook.tied_params_map or {})


def _nearest(candidates: Iterable[Dispatched | None]) -> Dispatched | None:
    order = ("device", "cpu", "disk")
    return min(filter(None, candidates), key=lambda candidate: order.index(candidate.where), default=None)


def _in_own_file(entry: _Entry) -> tuple[TensorSpec, FileSpan]:
    """A file that Accelerate wrote: the bare bytes, whose shape and dtype stand in the index."""
    path = Path(entry.folder or ".") / f"{entry.key}.dat"
    spec = TensorSpec(entry.shape, entry.dtype)
    try:
        file = SourceFile.at(path)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{path.absolute()} is gone, where Accelerate has put {entry.key}. Put it back, or load the model again"
        ) from error
    if file.size != max(spec.nbytes, 1):  # numpy maps no empty file, so an empty tensor has one byte
        raise CheckpointCorruptError(
            f"{file.path} has {file.size} bytes, and {entry.key} is {spec}, {spec.nbytes} bytes. Another model may "
            "have been offloaded to this folder: load the model again, with a folder of its own"
        )
    return spec, FileSpan(file, 0, spec.nbytes)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a cast from `narrow` to `wide` keeps every value."""
    floats = wide.is_floating_point and narrow.is_floating_point
    return floats and torch.finfo(wide).bits > torch.finfo(narrow).bits


def _check_shape(name: str, stored: tuple[int, ...], shown: torch.Tensor, where: str) -> None:
    if stored != tuple(shown.shape):
        raise CheckpointMismatchError(
            f"{name} is {list(shown.shape)} in the model and {list(stored)} in {where}. Load the model again"
        )


# Ties.


def _listed_ties(model: nn.Module, groups: Mapping[str, TensorGroup]) -> Iterator[tuple[str, str]]:
    """Pairs of names that Transformers lists as tied."""
    name_of = {path: name for name, group in groups.items() for path in group.names}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for tied, source in module.__dict__.get("all_tied_weights_keys", {}).items():
            if prefix + tied in name_of and prefix + source in name_of:
                yield name_of[prefix + source], name_of[prefix + tied]


class _Bonds:
    """Puts together what was found of tensors that are one."""

    def __init__(self, groups: Mapping[str, TensorGroup], found: Mapping[str, Dispatched | None]) -> None:
        self._groups, self._found = groups, found
        self._bundles = {name: [name] for name in groups}
        self._reader = FileReader()

    def join_what_shares_memory(self) -> None:
        firsts: dict[object, str] = {}
        for name, values in self._found.items():
            if values is not None and self._groups[name].spec.numel:
                self.join(firsts.setdefault(_address(values), name), name)

    def join(self, first: str, second: str, *, lend: bool = False) -> None:
        """Take two tensors for one, unless what can be seen of them contradicts.

        With `lend`, a tensor without values is taken for one with the other: the tie is all that is known of it.
        """
        bundle, other = self._bundles[first], self._bundles[second]
        if bundle is other or not self._are_alike(first, second):
            return
        values, others = self._values_of(bundle), self._values_of(other)
        if lend if values is None or others is None else self._are_one(values, others):
            bundle += other
            self._bundles.update(dict.fromkeys(other, bundle))

    def _are_alike(self, first: str, second: str) -> bool:
        one, other = self._groups[first], self._groups[second]
        return (one.kind, one.spec.shape) == (other.kind, other.spec.shape)

    def _values_of(self, bundle: Iterable[str]) -> Dispatched | None:
        return _nearest(self._found[name] for name in bundle)

    def _are_one(self, values: Dispatched, others: Dispatched) -> bool:
        if values.where == others.where == "device":
            return False  # the model itself shows which of these are one
        if (values.stored_dtype, values.dtype) != (others.stored_dtype, others.dtype):
            return False
        if _address(values) == _address(others):
            return True
        parts = zip(self._parts(values), self._parts(others), strict=True)
        return all(torch.equal(part, other) for part, other in parts)

    def _parts(self, values: Dispatched) -> Iterator[torch.Tensor]:
        """The bytes, a few at a time."""
        if values.tensor is not None:
            flat = values.tensor.detach().contiguous().view(-1).view(torch.uint8)
            yield from (part.cpu() for part in flat.split(_COMPARED_AT_ONCE))
        for span in values.spans:
            for start in range(0, span.nbytes, _COMPARED_AT_ONCE):
                part = torch.empty(min(_COMPARED_AT_ONCE, span.nbytes - start), dtype=torch.uint8)
                self._reader.read(span.file, span.offset + start, buffer_of(part))
                yield part

    def settled(self) -> dict[str, Dispatched]:
        """Each name's values: of those that are one, the nearest. Raises StateError where there are none."""
        settled = {}
        missing = []
        for name, bundle in self._bundles.items():
            values, own = self._values_of(bundle), self._found[name]
            if values is None:
                missing.append(name)
            else:
                settled[name] = replace(values, name=name, execution_device=(own or values).execution_device)
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise StateError(
                f"{', '.join(missing[:8])}{more}: on the meta device, and Accelerate has no values for it either. Load "
                "the model again, from a checkpoint that holds it; add adapters to it after it was adopted"
            )
        return settled

    def ties(self) -> list[list[str]]:
        order = {name: position for position, name in enumerate(self._groups)}
        bundles = {id(bundle): sorted(bundle, key=order.__getitem__) for bundle in self._bundles.values()}
        return [
            [path for name in bundle for path in self._groups[name].names]
            for bundle in bundles.values()
            if len(bundle) > 1
        ]


def _address(values: Dispatched) -> object:
    """Equal for tensors that are the same memory, or the same bytes of a file."""
    if values.tensor is None:
        return values.spans
    return values.tensor.device, values.tensor.data_ptr(), values.tensor.stride()


# Taking Accelerate off, and putting it back.

_ABSENT: Any = object()


def _remove_hooks(module: nn.Module, edits: list[Callable[[], None]]) -> None:
    hooks = _hooks_of(module)
    kept = [hook for hook in hooks if not _is_placement(hook)]
    if len(kept) == len(hooks):
        return
    owner: Any = module if "forward" in vars(module) else type(module)  # the forward of a traced module is its class's
    if kept or not _is_wrapper(vars(owner).get("forward")):
        # The wrapped forward stays, for the user's own hooks, or because the user has wrapped it again. It looks here.
        _replace(module, "_hf_hook", sys.modules["accelerate.hooks"].SequentialHook(*kept), edits)
        return
    original = vars(module)["_old_forward"]
    if owner is module:
        _replace(module, "forward", _of_the_instance(module, "forward", original), edits)
    else:
        _replace(owner, "forward", getattr(original, "__func__", original), edits)
    _replace(module, "_old_forward", _ABSENT, edits)
    _replace(module, "_hf_hook", _ABSENT, edits)


def _remove_warnings(module: nn.Module, edits: list[Callable[[], None]]) -> None:
    """`to`, `cuda` and their like of a model that was dispatched, which warn or refuse."""
    for name, method in list(vars(module).items()):
        if _is_warning(method):
            original = inspect.unwrap(method, stop=lambda wrapped: not _is_warning(wrapped))
            _replace(module, name, _of_the_instance(module, name, original), edits)


def _is_wrapper(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func.__module__ == "accelerate.hooks"


def _is_warning(method: Any) -> bool:
    return isinstance(method, FunctionType) and method.__globals__.get("__name__") == "accelerate.big_modeling"


def _of_the_instance(module: nn.Module, name: str, method: Any) -> Any:
    """What belongs in the instance's own table for `method`: nothing, if it is what the class has anyway."""
    return _ABSENT if getattr(method, "__func__", None) is getattr(type(module), name, None) else method


def _replace(owner: Any, name: str, value: Any, edits: list[Callable[[], None]]) -> None:
    edits.append(functools.partial(_put, owner, name, vars(owner).get(name, _ABSENT)))
    _put(owner, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
