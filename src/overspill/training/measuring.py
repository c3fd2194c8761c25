"""One step of a training, measured: what each of its blocks costs."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from overspill.devices import link_rate, peak_memory, reset_peak_memory, synchronize
from overspill.homes import DiskTensor, HostTensor
from overspill.training.blocks import Block, set_modes
from overspill.training.choosing import BlockCost, Choice, StepCost, choose
from overspill.training.modes import Mode
from overspill.training.watching import Watch

_MARGIN = 0.97
"""Of the budget: torch's allocator rounds sizes up, and the next batch may be a little longer."""

_WATCHED = 2

_CPU_LINK = 10e9
"""Bytes a second where the CPU computes, and nothing crosses a link."""


class Measurement:
    """The first two steps with gradients: every block is as frugal as it can be, and in the second it is watched.

    The first makes all memory and loads kernels, which takes longer than they do.
    """

    def __init__(self, blocks: Sequence[Block], budget: int, allowed: Sequence[Mode]) -> None:
        self._blocks, self._budget, self._allowed = list(blocks), budget, allowed
        self._device = blocks[0].activations.device
        self._step = 0
        self._peak = self._between = self._held = 0
        self._blocks_ended = False

    def begin_step(self) -> bool:
        """A forward with gradients begins. Whether the measurement is over, and the modes are chosen."""
        self._step += 1
        if self._step == _WATCHED:
            synchronize(self._device)
            reset_peak_memory(self._device)
            for block in self._blocks:
                block.watch = Watch(on_replay=self._begin_backward, small=block.activations.limits.small)
            watch = self._blocks[-1].watch
            assert watch is not None
            watch.on_end = self._end_blocks
        if self._step <= _WATCHED:
            return False
        choice = choose(self._cost(), int(self._budget * _MARGIN), self._allowed)
        set_modes(self._blocks, choice.modes)
        if not choice.step.ahead:
            activations = self._blocks[0].activations
            activations.limits = replace(activations.limits, ahead=0)
        for block in self._blocks:
            block.watch = None
        _announce(choice)
        return True

    def _end_blocks(self) -> None:
        """The last block's forward is over: a head and a loss follow."""
        self._height()
        self._blocks_ended = True

    def _begin_backward(self) -> None:
        """A block is about to be replayed."""
        if self._blocks_ended:
            self._held = self._blocks[0].activations.held_bytes
            self._between = max(self._between, self._height() - self._held)
            self._blocks_ended = False

    def _height(self) -> int:
        """The most memory since this was last asked."""
        height = peak_memory(self._device)
        reset_peak_memory(self._device)
        self._peak = max(self._peak, height)
        return height

    def _cost(self) -> StepCost:
        synchronize(self._device)
        self._height()
        return StepCost(
            blocks=tuple(_cost_of(block) for block in self._blocks),
            peak=self._peak,
            between=self._between,
            held=self._held,
            link=link_rate(self._device) or _CPU_LINK,
            slabs=self._blocks[0].activations.limits.ahead,
            measured_as=self._blocks[0].mode,
        )


def _cost_of(block: Block) -> BlockCost:
    watch = block.watch
    assert watch is not None
    parameters = list(block.module.parameters())
    away = [p for p in parameters if isinstance(p, HostTensor | DiskTensor)]
    here = [p for p in parameters if not isinstance(p, HostTensor | DiskTensor)]
    return BlockCost(
        name=block.name,
        forward=watch.seconds(),
        saved=watch.saved_bytes,
        largest=watch.largest_bytes,
        inputs=watch.input_bytes,
        gradients=sum(p.nbytes for p in here if p.requires_grad),
        streamed=sum(p.nbytes for p in away),
        replay=watch.replay_seconds(),
        sent=watch.sent_bytes,
        host=watch.host_seconds,
        tensors=watch.saved_tensors,
    )


def _announce(choice: Choice) -> None:
    sys.stdout.write(f"overspill: {choice}\n")
