"""Which blocks of a model are trained with less memory, and what happens around each of their calls."""

import difflib
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from overspill.attach import Arguments, is_compiled
from overspill.devices import running_backward
from overspill.errors import PlanError
from overspill.graph import SavedTensor, is_replaying
from overspill.homes import DiskTensor, HostTensor
from overspill.tensors import storage_key
from overspill.training.activations import Activations
from overspill.training.buffers import BlockBuffers
from overspill.training.host_room import HostRoom
from overspill.training.inputs import EditedInputs, Keeper
from overspill.training.modes import Mode
from overspill.training.recompute import Effects, Frame
from overspill.training.stored import Saved, end_unfinished
from overspill.training.watching import Watch
from overspill.units import cut, is_below

logger = logging.getLogger(__name__)


def find_blocks(model: nn.Module) -> list[str]:
    """The paths of the model's repeated blocks, in the order of definition."""
    roots = {root for unit in cut(model).units for root in unit.roots}
    lists = (nn.ModuleList, nn.Sequential)
    return [
        path
        for path, _ in model.named_modules()
        if path in roots and isinstance(model.get_submodule(path.rpartition(".")[0]), lists)
    ]


def choose_blocks(model: nn.Module, layers: int | Collection[str] | None) -> list[str]:
    """The paths of the blocks that `layers` means: the first few, those named, or all but the last."""
    if isinstance(layers, str):
        raise PlanError(f"layers must be a number of blocks or a list of their names: write [{layers!r}]")
    if layers is not None and not isinstance(layers, int):
        return _named(model, list(layers))
    blocks = find_blocks(model)
    if len(blocks) < 2:
        inside = ", ".join(repr(path) for path, _ in model.named_children()) or "none"
        raise PlanError(
            f"no repeated blocks were found in this {type(model).__name__}. Name what is to be offloaded: "
            f"layers=[...] with dotted paths of its modules (at the top: {inside})"
        )
    if layers is None:
        return blocks[:-1]
    if isinstance(layers, bool) or not 0 <= layers < len(blocks):
        raise PlanError(
            f"layers={layers} is out of range: this model has {len(blocks)} blocks, so it can be 0 to "
            f"{len(blocks) - 1}. The last one stays, since its backward comes at once"
        )
    return blocks[:layers]


def _named(model: nn.Module, names: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules or name == "":
            near = difflib.get_close_matches(name, modules, n=3, cutoff=0.4) or list(find_blocks(model))[:3]
            raise PlanError(f"layers names {name!r}, which is no module of this model. Near: {', '.join(near)}")
        inside = next((other for other in names if other != name and is_below(name, other)), None)
        if inside is not None:
            raise PlanError(f"layers names {name!r} and {inside!r}, which holds it. Name one of the two")
    if not names:
        raise PlanError("layers is an empty list. Name blocks, or give a number of them")
    order = {name: position for position, name in enumerate(modules)}
    return sorted(dict.fromkeys(names), key=lambda name: order[name])


def set_modes(blocks: Sequence["Block"], modes: Sequence[Mode]) -> None:
    """Have each block looked after in its mode."""
    # What one saves that is recomputed is little, and is needed first in backward.
    last = max((index for index, mode in enumerate(modes) if mode is Mode.OFFLOAD), default=-1)
    before = Mode.KEEP
    for index, (block, mode) in enumerate(zip(blocks, modes, strict=True)):
        block.mode, block.ends_forward = mode, index == last
        block.follows_one_that_left, before = before.leaves, mode


class Block:
    """One chosen block of a model."""

    def __init__(
        self, name: str, module: nn.Module, activations: Activations, room: HostRoom, inputs: EditedInputs
    ) -> None:
        self.name, self.module, self.mode = name, module, Mode.KEEP
        self.activations, self.room = activations, room
        self.effects = Effects(BlockBuffers(), inputs)
        self.watch: Watch | None = None  # while a step is being measured
        self.ends_forward = False  # no block behind it sends all that it saves
        self.follows_one_that_left = False
        self._without_attention = -1  # bytes of the largest inputs with which no attention was worth keeping
        self._warned = False

    def scope(self) -> "BlockScope":
        return BlockScope(self)

    def applies(self) -> bool:
        """Whether a call that begins now is a forward whose tensors are ours to look after."""
        if self.mode is Mode.KEEP or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        if is_replaying() or running_backward() is not None:  # what is saved now is needed at once
            return False
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # as in torch.func
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            self._warn()  # only the innermost hooks are called: ours would put an end to what others do
            return False
        return True

    def keeps_attention(self, nbytes: int) -> bool:
        """Whether to look for attention worth keeping in a call with so many bytes of inputs.

        A compiler would leave a block alone while somebody watches each operation.
        """
        may = self.mode is Mode.RECOMPUTE_OFFLOAD and nbytes > self._without_attention
        return may and not is_compiled(self.module)

    def called(self, frame: Frame) -> None:
        """A call that was to be replayed has ended."""
        if frame.fills_cache:
            _warn_of_cache(type(self.module).__name__)
        if not frame.kept_attention:
            self._without_attention = max(self._without_attention, frame.input_bytes)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s is called inside torch.utils.checkpoint or other saved-tensor hooks, which decide what it saves: "
                "it is left to them. To have its inputs offloaded, turn those off and pass recompute=True",
                self.name,
            )

    def weights(self) -> frozenset[int]:
        """The storages of its parameters and buffers, which stay where they are."""
        with torch._C.DisableTorchFunctionSubclass():
            return frozenset(
                storage_key(tensor)
                for module in self.module.modules()
                for table in (module._parameters, module._buffers)
                for tensor in table.values()
                if tensor is not None and not isinstance(tensor, DiskTensor | HostTensor)
            )

    def keeper(self, weights: frozenset[int]) -> Keeper:
        """Whoever keeps its inputs until it is recomputed."""
        if self.mode is Mode.RECOMPUTE:
            return _Here()
        return _Away(self.activations, weights, self.activations.begin_call(goes_on=self.follows_one_that_left))


@cache
def _warn_of_cache(kind: str) -> None:
    logger.warning(
        "blocks that are to be recomputed (%s) fill a key-value cache, which is kept for that. Pass use_cache=False: "
        "it takes memory, and training has no use for it",
        kind,
    )


class _Here:
    """What a recomputed block needs stays where it is."""

    def __call__(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return partial(_once_all_is_through, SavedTensor(tensor))

    def bring_next(self) -> None:
        """It is there."""


def _once_all_is_through(saved: SavedTensor) -> torch.Tensor:
    """A replay begins: blocks behind it have no memory any more, be it for copies that nobody needs."""
    end_unfinished()
    return saved.values()


class _Away:
    """What a recomputed block needs is in host memory until backward has come half-way through the block behind it."""

    def __init__(self, activations: Activations, weights: frozenset[int], back_to: int) -> None:
        self._activations, self._weights, self._back_to = activations, weights, back_to
        self._first: int | None = None  # place of what was put aside first, in the order of saving
        self._nbytes = 0

    def __call__(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        # Two may wait for their copies: the device computes for longer, from one of them to the next, than one takes.
        packed = self._activations.pack(tensor, self._weights, waiting=2)
        if not isinstance(packed, Saved):
            return packed.values
        first = self._first = packed.place if self._first is None else self._first
        self._nbytes += packed.stored.nbytes
        return lambda: self._activations.unpack(packed, back_to=first)

    def bring_next(self) -> None:
        if self._first is not None:
            self._activations.bring_back_before(self._first, self._nbytes, self._back_to)


class BlockScope:
    """Around one call of a block."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._recording = ExitStack()  # what is around the call itself
        self._frame: Frame | None = None
        self._watched: Callable[[], None] | None = None
        self._sent_before: int | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        block = self._block
        if not block.applies():
            return args, kwargs
        self._sent_before = block.activations.nbytes_sent
        weights = frozenset[int]() if block.mode is Mode.RECOMPUTE else block.weights()
        if block.mode.recomputes:
            keep = block.keeper(weights)
            device, keeps = block.activations.device, block.keeps_attention
            frame = Frame(
                block.name,
                block.module,
                args,
                kwargs,
                device,
                keep,
                block.effects,
                keeps_attention=keeps,
            )
            self._frame = frame
            if block.watch is not None:
                activations = block.activations
                self._watched = block.watch.begin_call(frame, weights, lambda: activations.nbytes_sent)
            for context in frame.recording():
                self._recording.enter_context(context)
        else:
            back_to = block.activations.begin_call(goes_on=block.follows_one_that_left)
            self._recording.enter_context(block.activations.saving(weights, back_to))
        return args, kwargs

    def leave(self, output: Any) -> Any:
        try:
            self._recording.close()
        finally:
            if self._frame is not None:
                self._frame.end(has_failed=output is None)
                self._block.called(self._frame)
        if self._block.ends_forward and self._sent_before is not None:
            self._block.activations.end_forward()
        if self._watched is not None:
            self._watched()
        if self._sent_before is not None and output is not None:
            self._block.room.check(self._block.name, self._block.activations.nbytes_sent - self._sent_before)
        return output
