"""A block that saves its inputs only, and is computed once more in backward.

Note: how a block is replayed. In forward, everything that an operation saves is replaced by a `_Place`, in the order of
saving. When backward asks for the first of them, the block is called again on its inputs, with the same random numbers
and the same autocast. What it saves now, in the same order, goes to the places that autograd still holds, and as soon
as the last one is filled the replay ends, wherever it is. The graph is the forward's own throughout, so `retain_graph`,
double backward and hooks need nothing special. Streamed weights have places as all else has. What fills those keeps the
window's memory, so it goes when the next block is replayed, at the latest.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from overspill.devices import (
    RandomState,
    at_end_of_backward,
    backward_number,
    current_stream,
    current_stream_waits,
    record_event,
    running_backward,
    stream_numbers,
)
from overspill.errors import StateError
from overspill.graph import Recorder, Replaying, Version, is_replaying, refuse_edited, refuse_other_version
from overspill.homes import edits_of
from overspill.integrations.caches import is_cache
from overspill.movement import taken_apart
from overspill.slab import Slab
from overspill.stand_ins import StandIns
from overspill.streamed import is_live
from overspill.tensors import storage_key
from overspill.training.attention import GiveAttention, KeepAttention
from overspill.training.buffers import BlockBuffers, BufferVersion
from overspill.training.inputs import EditedInputs, FilledCache, Input, Keeper
from overspill.units import modules_below


class Effects(NamedTuple):
    """What is known of what a block's calls do beside their results."""

    buffers: BlockBuffers
    inputs: EditedInputs


class _EnoughError(BaseException):
    """All that backward needs has been computed: no error, and for nobody but us to catch."""


_Version = Version | BufferVersion


class _Place:
    """One saved tensor of a block: empty until backward needs it."""

    __slots__ = ("__weakref__", "filled", "version")

    filled: tuple[torch.Tensor, int] | None
    """What a replay saved there, with its version. Both at once: another backward may fill it anew at any time."""
    version: _Version | None
    """Of what was saved, where nobody else would notice an edit of that."""

    def values(self) -> torch.Tensor:
        """What fills it, if that is what it was."""
        assert self.filled is not None
        tensor, version = self.filled
        if tensor._version != version:
            refuse_other_version(tensor.shape, tensor._version, version)
        return tensor


class Frame(Recorder):
    """One call of a block, to be replayed."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        keep: Keeper,
        effects: Effects,
        *,
        keeps_attention: Callable[[int], bool] = lambda nbytes: False,
    ) -> None:
        self._name, self._module, self._keep, self._device = name, module, keep, device
        leaves: list[Any] = []
        self._rebuild = taken_apart((args, kwargs), leaves)
        self._inputs: dict[int, Input] = {}  # one that is there twice, once
        self.input_bytes = 0
        self.fills_cache = False
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                known = self._inputs.get(id(leaf))
                if known is None:
                    known = self._inputs[id(leaf)] = Input(leaf, index)
                    if effects.inputs.may_edit(index):
                        known.keep_as_it_is()
                leaves[index] = known
                self.input_bytes += leaf.nbytes if leaf.layout is torch.strided else 0
            elif is_cache(leaf):
                leaves[index] = FilledCache(leaf)
                self.fills_cache = True
        self._leaves, self._effects = leaves, effects
        self._random: RandomState | None = RandomState(device)
        self._autocast = _Autocast(device)
        modules = modules_below(module)
        self._tables = [each._parameters for each in modules if each._parameters]
        self._weights = _weights_in(self._tables)
        self._edits = edits_of(self._weights)
        self._buffers = effects.buffers.begin_call(modules)
        self._attention = KeepAttention(keep) if keeps_attention(self.input_bytes) else None
        self._places: list[weakref.ref[_Place]] = []
        self._held: list[torch.Tensor] = []  # what is saved, until the call ends: it takes no more than a replay will
        self._versions: list[int] = []  # of that when it was saved, so that an edit in the call is seen
        self._shapes: list[torch.Size] = []  # of what was saved, to know whether a replay saves the same
        self._dtypes: list[torch.dtype] = []
        self._slabs: list[weakref.ref[Slab]] = []  # with the weights that it computes with
        self._streamed: frozenset[int] = frozenset()  # their storages
        self._stream = stream_numbers(device)
        self._replayed_on = 0  # the number of a stream
        self._filled_for: int | None = None
        self._asked = 0  # how many of the places, since they were filled
        self._half = 0  # of them
        self._lock = threading.RLock()
        self.on_save: Callable[[torch.Tensor], None] | None = None
        """Called for each tensor that the block saves."""
        self.on_replay: Callable[[], Callable[[], object]] = lambda: _nothing
        """Called when a replay begins. What it returns is called when that ends."""

    def recording(self) -> Iterator[AbstractContextManager[object]]:
        """Within these, the block is called for the first time."""
        yield torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        if self._attention is not None:
            yield self._attention

    def end(self, *, has_failed: bool = False) -> None:
        """It has been called."""
        if self._random is not None and not self._random.has_passed():
            self._random = None  # to go back and forth takes time, and a replay is what short steps wait for
        if self._buffers is not None:
            self._buffers.end_call(has_failed=has_failed)
        self._half = max(len(self._places) // 2, 1)
        self._watch_what_is_left()
        # Last, since backward needs them first: what is put aside comes back in the opposite order. A block that saved
        # nothing needs no inputs either.
        inputs = self._inputs.values()
        self._effects.inputs.see(inputs, has_failed=has_failed)
        for each in inputs if self._places else ():
            each.put_aside(self._keep)

    def _watch_what_is_left(self) -> None:
        """Know of edits of what outlives the call: hardly any of it, and to watch all is what short steps wait for."""
        watched: dict[
            tuple[int, int], tuple[torch.Tensor, _Version | None]
        ] = {}  # held, so that no identity is used again
        versions = self._versions
        for index, reference in self._let_go_of_what_was_saved():
            place, held = self._places[index](), reference()
            if place is None or held is None:
                continue
            key = id(held), versions[index]
            if key not in watched:
                watched[key] = held, self._version_of(held, versions[index])
            place.version = watched[key][1]
        self._versions = []

    def _version_of(self, held: torch.Tensor, expected: int) -> _Version | None:
        """What tells of edits. Of a streamed tensor, its home does. A replay begins with those of parameters."""
        if storage_key(held) not in self._streamed:
            return Version(held, expected)
        return None if self._buffers is None else self._buffers.version_of(held)

    def _let_go_of_what_was_saved(self) -> list[tuple[int, "weakref.ref[torch.Tensor]"]]:
        """What was saved there is gone, unless somebody else has it: the number of its place, and the tensor."""
        held = self._held
        if [each._version for each in held] != self._versions:
            self._note_edits()
        # Whoever has a view has its base as well, and the two share their version.
        bases = [each._base for each in held]
        references = [weakref.ref(each if base is None else base) for each, base in zip(held, bases, strict=True)]
        del bases
        held.clear()
        return [each for each in enumerate(references) if each[1]() is not None]

    def _note_edits(self) -> None:
        """The call has edited something after it was saved."""
        # Not as many of each where an interrupt came in between.
        for reference, held, expected in zip(self._places, self._held, self._versions, strict=False):
            place = reference()
            if place is not None and held._version != expected:
                place.version = Version(held, expected)

    @property
    def kept_attention(self) -> bool:
        """Whether there was any worth keeping."""
        return self._attention is not None and bool(self._attention.results)

    def takes_weights(self, module: nn.Module, slabs: Sequence[Slab]) -> bool:
        # Not those of its parts: a replay needs one after the other, and the window has room for a few.
        if module is not self._module:
            return False
        self._slabs = [weakref.ref(slab) for slab in slabs]
        self._streamed = frozenset(storage_key(slab.memory) for slab in slabs)
        if self._buffers is not None and not is_replaying():
            self._buffers.are_shown()
        return True

    def _pack(self, tensor: torch.Tensor) -> _Place:
        # No call that need not be one: a block saves dozens of tensors, and short steps wait for what is done for each.
        place = _Place()
        place.filled = place.version = None
        self._places.append(weakref.ref(place))
        self._versions.append(tensor._version)  # first: an interrupt may come in between
        self._held.append(tensor)
        self._shapes.append(tensor.shape)
        self._dtypes.append(tensor.dtype)
        if self.on_save is not None and storage_key(tensor) not in self._streamed:
            self.on_save(tensor)
        return place

    def _unpack(self, place: _Place) -> torch.Tensor:
        if place.version is not None:
            place.version.check()
        filled = place.filled
        if filled is None or backward_number() != self._filled_for:
            filled = self._fill(place)
        if self._stream() != self._replayed_on:
            self._follow_here()
        self._asked += 1
        if self._asked == self._half:
            # Not before: what takes most memory, in most blocks the end of them, is through by now.
            self._keep.bring_next()
        tensor, version = filled
        if tensor._version != version:
            refuse_other_version(tensor.shape, tensor._version, version)
        return tensor

    def _follow_here(self) -> None:
        """Have the current stream, which is not the replay's, use what was replayed: behind that, and in front of
        whoever has the slabs next.
        """
        current_stream_waits(self._device, record_event(self._device, self._replay_stream))
        for reference in self._slabs:
            slab = reference()
            if slab is not None:
                slab.lend_on(self._stream())

    def _fill(self, place: _Place) -> tuple[torch.Tensor, int]:
        """Fill all places, unless another thread of this backward has done so meanwhile."""
        backward = running_backward()
        self._follow_last_replay()
        with self._lock:
            if place.filled is not None and backward is not None and backward == self._filled_for:
                return place.filled
            end = self.on_replay()
            self._replay()
            end()
            self._asked = 0
            self._filled_for = backward  # last: `_unpack` looks at it without the lock
            if backward is not None:
                # A graph that is retained keeps its places, but not what is in them. Weakly: one that is not retained
                # is gone long before the end, and so must its inputs be.
                at_end_of_backward(partial(_empty, weakref.ref(self)))
            assert place.filled is not None
            return place.filled

    def _follow_last_replay(self) -> None:
        """Where a graph is retained, the block that this thread replayed last would keep its weights."""
        last = getattr(_thread, "replayed", _no_frame)()
        if last is not None and last is not self:
            last.let_go_of_weights()
        _thread.replayed = weakref.ref(self)

    def let_go_of_weights(self) -> None:
        """Keep no memory of a window. Whoever asks for a weight again has the block replayed."""
        with self._lock:
            for place in self._left():
                if place.filled is not None and storage_key(place.filled[0]) in self._streamed:
                    place.filled = None

    def empty(self) -> None:
        """Let go of all that was replayed."""
        self._filled_for = None
        for place in self._left():
            place.filled = None

    def _left(self) -> Iterator[_Place]:
        """The places that a graph still has."""
        return (place for reference in self._places if (place := reference()) is not None)

    # The second time.

    def _replay(self) -> None:
        if edits_of(self._weights) != self._edits:
            refuse_edited(f"a weight of {self._name}, which is to be recomputed, was edited since its forward")
        leaves = (leaf.again() if isinstance(leaf, Input | FilledCache) else leaf for leaf in self._leaves)
        args, kwargs = self._rebuild(leaves)
        filling, replaying = _Filling(self, self._places, self._shapes, self._dtypes), Replaying()
        pack = filling.pack
        unshared = sys.getrefcount(pack)
        self._replayed_on, self._replay_stream = self._stream(), current_stream(self._device)
        try:
            with replaying, torch.enable_grad(), ExitStack() as stack:
                if self._random is not None:
                    stack.enter_context(self._random.again())
                self._autocast.again(stack)
                stack.enter_context(self._weights_again())
                if self._buffers is not None:
                    stack.enter_context(self._buffers.again(self._name, self._device))
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _values))
                if self._attention is not None and self.kept_attention:
                    stack.enter_context(GiveAttention(self._attention.results))
                self._module(*args, **kwargs)
        except _EnoughError:
            pass
        finally:
            filling.end()
        if sys.getrefcount(pack) > unshared:  # the block has left a result in an argument or an attribute
            replaying.let_go_of_weights()
        if not filling.is_done:
            self.refuse_difference()

    def _weights_again(self) -> AbstractContextManager[None]:
        """Within, the modules show the weights of the forward: for that call, or since, others may have been there."""
        now = _weights_in(self._tables)
        if len(now) == len(self._weights) and all(map(is_, now, self._weights)):  # as nearly always
            return nullcontext()
        if any(map(_is_sharded, modules_below(self._module))):
            return nullcontext()
        if len(now) != len(self._weights):
            self.refuse_difference()
        names = [(table, name) for table in self._tables for name in table if table[name] is not None]
        # One that is live is shown for a call in another thread, in the place of the weight itself.
        return StandIns(
            (table, name, then)
            for (table, name), then, shown in zip(names, self._weights, now, strict=True)
            if then is not shown and not is_live(then) and not is_live(shown)
        )

    def refuse_difference(self) -> NoReturn:
        """It did something else the second time."""
        raise StateError(
            f"{self._name} saved other tensors when it was recomputed than in its forward, so its gradients cannot be "
            "computed. Its forward must do the same twice: pass use_cache=False to a model that remembers what it "
            "computes, or name other blocks in layers="
        )


_thread = threading.local()


def _no_frame() -> None:
    """This thread has replayed nothing yet."""


_Table = dict[str, nn.Parameter | None]


def _weights_in(tables: Sequence[_Table]) -> list[torch.Tensor]:
    """Each parameter in these. One that is there twice is here twice."""
    return [weight for table in tables for weight in table.values() if weight is not None]


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP, of either kind, puts a module's weights together for a forward, and again for a backward.

    It shows others in between, and sees itself to what a replay computes with. The mark is there for torch's compiler.
    """
    return "_is_fsdp_managed_module" in vars(module)


def _empty(reference: "weakref.ref[Frame]") -> None:
    frame = reference()
    if frame is not None:
        frame.empty()


def _nothing() -> None:
    """Nobody watches."""


class _Filling(Recorder):
    """A replay's saved tensors on their way to their places."""

    def __init__(
        self,
        frame: Frame,
        places: Sequence["weakref.ref[_Place]"],
        shapes: Sequence[torch.Size],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self._frame, self._places, self._shapes, self._dtypes = frame, places, shapes, dtypes
        self._filled, self._last = 0, len(places) - 1
        self._own: list[_Place] = []  # that no graph has any more, but a block may compute gradients within itself

    def takes_weights(self, module: nn.Module, slabs: Sequence[Slab]) -> bool:
        return self._frame.takes_weights(module, slabs)

    @property
    def is_done(self) -> bool:
        return self._filled > self._last

    def end(self) -> None:
        """The replay has ended. Its graph, which has this, may not have."""
        del self._frame, self._own

    def pack(self, tensor: torch.Tensor) -> "weakref.ref[_Place]":
        index = self._filled
        if index > self._last:
            raise _EnoughError
        reference = self._places[index]
        place = reference()
        if place is None:
            place = _Place()
            self._own.append(place)
            reference = weakref.ref(place)
        elif self._shapes[index] != tensor.shape or self._dtypes[index] is not tensor.dtype:
            self._frame.refuse_difference()
        # Detached: a node that saved its own result would otherwise hold itself. The two share their version.
        place.filled = tensor.detach(), tensor._version
        self._filled = index + 1
        if index == self._last:
            raise _EnoughError
        return reference


def _values(reference: "weakref.ref[_Place]") -> torch.Tensor:
    """What a replay saved, for gradients that its block computes within itself."""
    place = reference()
    if place is None:
        raise StateError("this was computed when a block was recomputed. Use what its forward computed")
    return place.values()


class _Autocast:
    """How autocast was set."""

    def __init__(self, device: torch.device) -> None:
        self._kinds = _autocast_kinds(device)
        self._settings: list[tuple[str, bool, torch.dtype]] = []
        if _is_any_autocast_enabled():  # to ask about each kind takes longer, and short steps wait for it
            self._settings = [
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds
            ]
            self._cache = torch.is_autocast_cache_enabled()

    def again(self, stack: ExitStack) -> None:
        if self._settings:
            for kind, enabled, dtype in self._settings:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
        elif _is_any_autocast_enabled():
            for kind in self._kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))


_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


@cache
def _autocast_kinds(device: torch.device) -> tuple[str, ...]:
    """The kinds of devices whose autocast a block on `device` may be in."""
    return tuple(dict.fromkeys(("cpu", device.type)))
