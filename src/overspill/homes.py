"""What `model.parameters()` shows while a unit is not computing: tensors that are offloaded and still never wrong.

Note: homes. A host home is a real CPU parameter: its memory is the truth, so reads, writes and optimizers just work. A
disk home has the true shape and dtype and no memory: a read materialises the values, a write or a view (it could be
written through) promotes them to host memory first, so that the edit is part of the model from then on. Both watch
what is done with them: a copy that is on its way to the device must end before its source is edited, a copy that was
made before an edit must be refreshed, and a home that is read beside tensors of another device goes there by itself.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from overspill.checkpoint.index import FileSpan
from overspill.checkpoint.reader import RangeReader
from overspill.config import HOST_ALIGNMENT, align
from overspill.devices import CPU, buffer_of, storage_use_count, users_counter, wait_for_pinned
from overspill.errors import StateError
from overspill.tensors import TensorSpec

_computing = threading.local()


class ComputingOn:
    """While this thread is in a model's forward on `device`: homes that it uses outside any unit act as if there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before: torch.device = getattr(_computing, "device", CPU)
        _computing.device = self._device

    def __exit__(self, *exc: object) -> None:
        _computing.device = self._before


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(torch.Tensor, name).__set__


_DEVICE_GETTERS = {_getter("device"): lambda device: device, _getter("is_cuda"): lambda device: device.type == "cuda"}

# What says nothing about values: it neither waits for copies nor counts as an edit.
_INERT = {
    *map(_getter, ("shape", "dtype", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "_version", "ndim")),
    *map(_getter, ("is_meta", "is_quantized", "is_sparse", "is_nested", "nbytes", "itemsize", "output_nr")),
    *map(_getter, ("_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "is_cpu")),
    *map(_setter, ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")),
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.stride,
    torch.Tensor.storage_offset,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.__hash__,
    torch.Tensor.__len__,
    torch.Tensor.type,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.autograd.grad,  # of a home itself
}

# Functions that only read their weights but take views of them inside, which would look like views a user keeps.
_READERS = {
    functional.linear,
    functional.bilinear,
    functional.embedding,
    functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.einsum,
    torch.tensordot,
    torch.equal,
    torch.Tensor.equal,
    torch.allclose,
}


class _Home:
    """What host and disk homes share: whoever uses one is noticed, and gets it on the right device."""

    def touched(self) -> None:
        """Something that may edit the values, now or through an alias, is about to happen."""
        raise AssertionError

    def read_on(self, device: torch.device) -> torch.Tensor:
        """The values as an ordinary tensor on `device`, with a way back for gradients."""
        raise AssertionError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device: torch.device = getattr(_computing, "device", CPU)
        if func in _DEVICE_GETTERS and device != CPU:
            return _DEVICE_GETTERS[func](device)
        if func is torch.autograd.grad and not _has_home(args[0]):
            return _gradients(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _INERT or func in _DEVICE_GETTERS:
                return func(*args, **kwargs)
            leaves, shape = tree_flatten((args, kwargs))
            # Outside of a forward too: a thread may be inside a block that another one is just offloading.
            others = _device_of_others(leaves)
            target = others or device
            if func in _READERS or (target != CPU and not _edits(func, args, kwargs)):
                leaves = [leaf.read_on(target) if isinstance(leaf, _Home) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(leaves, shape)
            elif target != CPU and _is_edited_there(func, args, leaves, draws=others is None):
                there, *rest = [leaf.read_on(target) if isinstance(leaf, _Home) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten([there, *rest], shape)
                func(*args, **kwargs)
                leaves[0].touched()
                return leaves[0].copy_(there)
            else:
                for leaf in leaves:
                    if isinstance(leaf, _Home):
                        leaf.touched()
                wait_for_pinned(kwargs.values())
            return func(*args, **kwargs)


def _gradients(
    outputs: Any,
    inputs: Sequence[Any],
    *,
    materialize_grads: bool = False,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **options: Any,
) -> Sequence[torch.Tensor | None]:
    """`torch.autograd.grad`, with homes among the inputs.

    Those are named by their edges. Else all of the backward would run within this function of theirs, where none acts
    as a home: not in a checkpoint that is computed once more, either.
    """
    edges = [_edge(each) if _has_home(each) else each for each in inputs]
    unused = materialize_grads if allow_unused is None else allow_unused
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        outputs, edges, create_graph=create_graph, allow_unused=unused, **options
    )
    if not materialize_grads:
        return found
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(
            torch.zeros_like(each, requires_grad=create_graph) if gradient is None else gradient
            for gradient, each in zip(found, inputs, strict=True)
        )


def _edge(home: torch.Tensor) -> GradientEdge:
    with torch._C.DisableTorchFunctionSubclass():
        if not home.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        return get_gradient_edge(home)


def _edits(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a home may be changed: by add_, __setitem__, __iadd__, as `out=`, through `.data` or its memory."""
    if _has_home(kwargs.get("out")):
        return True
    name: str = getattr(func, "__name__", "")
    if name in _TAKE_FROM_ANYWHERE:  # another tensor may be what is changed
        return True
    in_place = name.endswith("_") and not name.endswith("__")
    return _has_home(args[:1]) and (
        in_place
        or name in {"__set__", "__get__", "data_ptr", "untyped_storage"}
        or (name.startswith("__i") and name.endswith("__") and name not in {"__index__", "__int__", "__invert__"})
    )


def _is_edited_there(func: Callable[..., Any], args: Sequence[Any], leaves: Sequence[Any], *, draws: bool) -> bool:
    """Whether a home is edited in place with tensors of a device, or (`draws`) with random numbers of the device where
    the model computes: what is at home has to go there for that, and come back.
    """
    name: str = getattr(func, "__name__", "")
    if not args or not isinstance(args[0], _Home) or name in _TAKE_FROM_ANYWHERE:
        return False
    in_place = name in _DRAW if draws else name.endswith("_") and (name.startswith("__i") or not name.endswith("__"))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return in_place and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


_TAKE_FROM_ANYWHERE: Final = frozenset({"copy_", "__setitem__"})
_DRAW: Final = frozenset(
    ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")
)


def _has_home(value: Any) -> bool:
    return any(isinstance(leaf, _Home) for leaf in tree_leaves(value))


def _device_of_others(leaves: Iterable[Any]) -> torch.device | None:
    """The accelerator that a home is used on, if it meets tensors there."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, _Home) and leaf.device != CPU:
            return leaf.device
    return None


def plain_parameter(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values` as an ordinary tensor, or as a Parameter where `like` is one."""
    if isinstance(like, nn.Parameter):
        return nn.Parameter(values, like.requires_grad)
    return values


class HostSlot:
    """What a host home knows of its place: how often it was used, and what to wait for before it may be edited."""

    def __init__(self, home: torch.Tensor, settle: Callable[[], None]) -> None:
        self.settle = settle
        self.uses = 0
        with torch._C.DisableTorchFunctionSubclass():
            self._address = home.data_ptr()
            self._storage = home.untyped_storage()
        self._users = users_counter(self._storage)
        self._unshared = self._users()  # nobody outside holds an alias yet

    def stamp(self, home: torch.Tensor) -> object:
        """Equal to an earlier stamp only if nobody can have changed the values since. `home`, or its plain values."""
        if self.is_shared() or home.data_ptr() != self._address:
            return object()
        return self.uses, home._version

    def is_shared(self) -> bool:
        """Whether an alias of the home is alive somewhere: it may be written through at any time, unseen."""
        return self._users() > self._unshared


class HostSlots:
    """The slots of a unit's homes, asked in one go: that is done several times a call, and short steps wait for it."""

    def __init__(self) -> None:
        self._slots: list[HostSlot] = []
        self._storages: list[int] = []
        self._unshared: list[int] = []
        self._addresses: list[int] = []

    def add(self, slot: HostSlot) -> None:
        """One more."""
        self._slots.append(slot)
        self._storages.append(slot._storage._cdata)
        self._unshared.append(slot._unshared)
        self._addresses.append(slot._address)

    def stamps(self, homes: Sequence[torch.Tensor]) -> list[object]:
        """The stamp of each."""
        if self._may_be_shared() or [home.data_ptr() for home in homes] != self._addresses:
            return [slot.stamp(home) for slot, home in zip(self._slots, homes, strict=True)]
        return [(slot.uses, home._version) for slot, home in zip(self._slots, homes, strict=True)]

    def any_shared(self) -> bool:
        """Whether one of them is."""
        return self._may_be_shared() and any(slot.is_shared() for slot in self._slots)

    def _may_be_shared(self) -> bool:
        return list(map(storage_use_count, self._storages)) != self._unshared


class HostTensor(_Home, torch.Tensor):
    """A real CPU tensor, a view of its unit's pinned slab with a storage of its own."""

    _overspill_slot: HostSlot

    def touched(self) -> None:
        self._overspill_slot.uses += 1
        self._overspill_slot.settle()

    def read_on(self, device: torch.device) -> torch.Tensor:
        return self.to(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = plain_parameter(self.detach().clone(), self)
        return cast(torch.Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            values = self.detach()
        values.__class__ = torch.Tensor
        return plain_parameter(values, self).__reduce_ex__(protocol)


class HostParameter(HostTensor, nn.Parameter):
    """A host home that is a parameter."""

    __reduce_ex__ = HostTensor.__reduce_ex__  # not Parameter's


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is, home or not, an ordinary tensor, of which anything can be done: a copy above all."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def edits_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each of some tensors, which may be homes, was edited so far."""
    with torch._C.DisableTorchFunctionSubclass():  # a home's own way to its version is long
        return [
            tensor._overspill_values.edits if isinstance(tensor, DiskTensor) else tensor._version for tensor in tensors
        ]


def host_home(values: torch.Tensor, like: torch.Tensor) -> HostTensor:
    """A home over `values`, which must have a storage of its own, in the place of `like`. It needs a slot yet."""
    home: torch.Tensor = nn.Parameter(values, like.requires_grad) if isinstance(like, nn.Parameter) else values.detach()
    home.__class__ = HostParameter if isinstance(like, nn.Parameter) else HostTensor
    home.__dict__.update(like.__dict__)  # what libraries note on their parameters
    return cast(HostTensor, home)


class DiskValues:
    """The truth about one tensor on disk: spans of files, or host memory once it was promoted."""

    def __init__(self, name: str, spec: TensorSpec, spans: Sequence[FileSpan], reader: RangeReader) -> None:
        self.name, self.spec, self.spans = name, spec, tuple(spans)
        self.reader = reader
        self._lock = threading.Lock()
        self.memory: torch.Tensor | None = None
        self._slot: HostSlot | None = None
        self.edits = 0  # in-place edits so far: what `_version` is to an ordinary tensor

    def read(self) -> torch.Tensor:
        """The values: fresh memory, or the promoted memory itself."""
        memory = self.memory
        return self._from_files() if memory is None else memory

    def promote(self) -> torch.Tensor:
        """The values in host memory, where they stay: an edit there is the truth from now on."""
        with self._lock:
            if self.memory is None:
                self._settle(self._from_files())
            assert self.memory is not None
            assert self._slot is not None
            # Whoever gets it may write through a view, which has a version of its own, and be gone by the next stamp.
            self._slot.uses += 1
            return self.memory

    def replace(self, values: torch.Tensor, *, edits: int = 1) -> None:
        """Take `values` as the truth: as so many edits, of those that autograd notices."""
        with self._lock:
            if self.memory is None:
                self._settle(_aligned_empty(self.spec))
            assert self.memory is not None
            self.memory.copy_(values)
            self.edits += edits

    def stamp(self) -> object:
        """Equal to an earlier one only if nobody can have changed the values since."""
        if self.memory is None or self._slot is None:
            return "on disk"
        return self.edits, self._slot.stamp(self.memory)  # our own writes leave no trace in the memory's version

    def _settle(self, memory: torch.Tensor) -> None:
        self._slot = HostSlot(memory, lambda: None)  # nothing is ever copied straight from here
        self.memory = memory

    def _from_files(self) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            values = _aligned_empty(self.spec)
            if values.numel():
                self._read_files(0, buffer_of(values))  # dense, in whatever order
            return values

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Some of the values as they lie in the files, flat."""
        with torch.inference_mode(False), torch.no_grad():
            values = torch.empty(stop - start, dtype=self.spec.dtype)
            self._read_files(start * values.itemsize, buffer_of(values))
            return values

    def spans_of(self, start: int, stop: int) -> Iterator[FileSpan]:
        """Where the bytes from `start` to `stop` lie."""
        reached = 0
        for span in self.spans:
            low, high = max(start - reached, 0), min(stop - reached, span.nbytes)
            if low < high:
                yield span.part(low, high)
            reached += span.nbytes

    def _read_files(self, start: int, target: memoryview) -> None:
        done = 0
        for span in self.spans_of(start, start + target.nbytes):
            self.reader.read(span.file, span.offset, target[done : done + span.nbytes])
            done += span.nbytes


def _aligned_empty(spec: TensorSpec) -> torch.Tensor:
    """Fresh host memory for one tensor, aligned so that CPU kernels round as they do on any other tensor."""
    memory = torch.empty(align(spec.nbytes, HOST_ALIGNMENT) + HOST_ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % HOST_ALIGNMENT
    return spec.shaped(memory[start : start + spec.nbytes].view(spec.dtype))


class DiskTensor(_Home, torch.Tensor):
    """A tensor without memory, whose values lie in files."""

    _overspill_values: DiskValues

    @staticmethod
    def __new__(cls, values: DiskValues, requires_grad: bool = False) -> "DiskTensor":
        tensor: DiskTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.spec.shape,
            strides=values.spec.strides,
            dtype=values.spec.dtype,
            device=CPU,
            requires_grad=requires_grad,
        )
        tensor._overspill_values = values
        return tensor

    def touched(self) -> None:
        """Nothing to do here: `__torch_dispatch__` sees every write."""

    def read_on(self, device: torch.device) -> torch.Tensor:
        return self.clone() if device == CPU else self.to(device)

    def __repr__(self) -> str:  # type: ignore[override]  # a repr reads nothing
        values = self._overspill_values
        where = values.spans[0].file.path if values.memory is None and values.spans else "host memory"
        return f"DiskTensor({values.name}: {values.spec}, {where})"

    @property
    def data(self) -> torch.Tensor:
        return cast(torch.Tensor, _getter("data")(self))

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if isinstance(values, DiskTensor) and values._overspill_values is self._overspill_values:
            return  # `module.to(...)` and `module.float()` assign what is right already: it stays on disk
        if TensorSpec.of(values) != self._overspill_values.spec:
            raise StateError(
                f"{self._overspill_values.name} is {self._overspill_values.spec} on disk and cannot become "
                f"{TensorSpec.of(values)} through .data. Assign a new nn.Parameter to its module instead"
            )
        self._overspill_values.replace(values.detach())

    def numpy(self, *, force: bool = False) -> Any:
        return self._overspill_values.promote().numpy(force=force)

    def tolist(self) -> Any:
        return self._overspill_values.read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return cast(torch.Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        return plain_parameter(self._overspill_values.read().clone(), self)

    def data_ptr(self) -> int:
        # PEFT compares addresses to see whether a tie still holds. What is at one can be written, as through a view.
        return self._overspill_values.promote().data_ptr()

    def untyped_storage(self) -> NoReturn:
        raise StateError(
            f"{self._overspill_values.name} lies on disk and has no storage. Copy it first: parameter.detach().clone()"
        )

    def __dlpack__(self, **options: Any) -> Any:
        return self._overspill_values.promote().__dlpack__(**options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub leaves out func
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            # state_dict and .data go through detach: it stays lazy, and shares the values.
            detached = cls(args[0]._overspill_values)
            try:
                return return_and_correct_aliasing(func, tuple(args), dict(kwargs), detached)
            except RuntimeError:  # another thread has just made an ordinary tensor of it, on a device of its own
                return detached
        if func is torch.ops.aten.clone.default and args[0]._overspill_values.memory is None:
            return args[0]._overspill_values.read()
        schema = func._schema
        aliased = {argument.name for argument in schema.arguments if argument.alias_info is not None}
        written = {
            argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
        }
        given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
        plain = {name: _unwrapped(value, promote=name in aliased) for name, value in given.items()}
        names = list(given)[: len(args)]
        result = func(*(plain[name] for name in names), **{name: plain[name] for name in kwargs})
        for leaf in tree_leaves([given[name] for name in written if name in given]):
            if isinstance(leaf, DiskTensor):
                leaf._overspill_values.edits += 1
        returns = schema.returns
        if returns and returns[0].alias_info is not None and returns[0].alias_info.is_write:
            target = args[0] if args else result
            return target if isinstance(target, DiskTensor) else result
        return result


def _unwrapped(value: Any, *, promote: bool) -> Any:
    """`value` with each disk home in it replaced by its values: by their permanent memory if it may be written to."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, DiskTensor):
            return leaf
        return leaf._overspill_values.promote() if promote else leaf._overspill_values.read()

    return tree_map(plain, value)


def disk_home(values: DiskValues, like: torch.Tensor) -> torch.Tensor:
    """A home for `values` in the place of `like`."""
    home: torch.Tensor = DiskTensor(values)
    if isinstance(like, nn.Parameter):
        home = nn.Parameter(home, like.requires_grad)
    home.__dict__.update(like.__dict__)  # what libraries note on their parameters
    return home


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, home or not: its own memory where it has some."""
    if isinstance(tensor, DiskTensor):
        return tensor._overspill_values.read()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


_PLAIN = (torch.Tensor, nn.Parameter, HostTensor, HostParameter, DiskTensor)
