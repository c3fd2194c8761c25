"""One step of a training, measured: what each of its blocks costs."""

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import torch

from overspill.config import KIB
from overspill.devices import link_rate, peak_memory, reset_peak_memory, synchronize
from overspill.homes import DiskTensor, HostTensor
from overspill.training.activations import Activations, Limits
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
        self._replayed: Watch | None = None  # whose backward is under way

    def begin_step(self) -> bool:
        """A forward with gradients begins. Whether the measurement is over, and the modes are chosen."""
        self._step += 1
        if self._step == _WATCHED:
            synchronize(self._device)
            reset_peak_memory(self._device)
            for block in self._blocks:
                block.watch = Watch(self._begin_backward, self._device, small=block.activations.limits.small)
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

    def _begin_backward(self, watch: Watch) -> None:
        """A block is about to be replayed, and the one behind it is done."""
        if self._replayed is not None:
            self._replayed.end_backward()
        self._replayed = watch
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
            blocks=_costs_of(self._blocks),
            peak=self._peak,
            between=self._between,
            held=self._held,
            link=link_rate(self._device) or _CPU_LINK,
            host_a_tensor=_host_a_tensor(self._device),
            slabs=self._blocks[0].activations.limits.ahead,
            measured_as=self._blocks[0].mode,
        )


def _costs_of(blocks: Iterable[Block]) -> tuple[BlockCost, ...]:
    """What each of them costs. Blocks alike take the same time: what one took longer, others did meanwhile."""
    alike: defaultdict[object, list[BlockCost]] = defaultdict(list)
    costs = []
    for block in blocks:
        cost = _cost_of(block)
        kind = alike[type(block.module), cost.gradients, cost.streamed, cost.saved]
        kind.append(cost)
        costs.append((cost, kind))
    return tuple(_usual(cost, kind) for cost, kind in costs)


def _usual(cost: BlockCost, alike: Sequence[BlockCost]) -> BlockCost:
    return replace(
        cost,
        forward=median(each.forward for each in alike),
        backward=_median_of_known(each.backward for each in alike),
        host=median(each.host for each in alike),
        replay=_median_of_known(each.replay for each in alike),
    )


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _host_a_tensor(device: torch.device) -> float:
    """Seconds in which the host sends a tensor of no size to speak of, or brings it back: tried, on `device`."""
    activations = Activations(device, Limits(small=0, held=_TRIED * _TINY, ahead=0))
    return _AMONG_OTHERS * median(_there_and_back(activations) for _ in range(5)) / (2 * _TRIED)


_TINY, _TRIED = 64 * KIB, 16

_AMONG_OTHERS = 2.5
"""Times as long as in a row, between the operations of a step: 0.32 ms for 0.13. With all of 28 Llama blocks offloaded,
14 tensors each, a step took 0.377 s, kept 0.134 s, recomputed 0.243 s (3B size, 2,048 tokens, H200, torch 2.11)."""


def _there_and_back(activations: Activations) -> float:
    """Seconds in which the host sends some tensors, and brings them back."""
    tensors = [torch.empty(_TINY, dtype=torch.uint8, device=activations.device) for _ in range(_TRIED)]
    start = time.perf_counter()
    packed = [activations.pack(tensor) for tensor in tensors]
    sent = time.perf_counter() - start
    del tensors
    synchronize(activations.device)
    activations.let_go()
    start = time.perf_counter()
    for each in reversed(packed):
        activations.unpack(each)
    return sent + time.perf_counter() - start


def _cost_of(block: Block) -> BlockCost:
    watch = block.watch
    assert watch is not None
    parameters = list(block.module.parameters())
    away = [p for p in parameters if isinstance(p, HostTensor | DiskTensor)]
    here = [p for p in parameters if not isinstance(p, HostTensor | DiskTensor)]
    forward, replay = watch.seconds(), watch.replay_seconds()
    if away and replay is not None and watch.sent_bytes <= watch.input_bytes:
        forward = min(forward, replay)  # without waiting for weights: how long those take is known from their bytes
    return BlockCost(
        name=block.name,
        forward=forward,
        backward=watch.backward_seconds(),
        saved=watch.saved_bytes,
        largest=watch.largest_bytes,
        inputs=watch.input_bytes,
        gradients=sum(p.nbytes for p in here if p.requires_grad),
        streamed=sum(p.nbytes for p in away),
        replay=replay,
        sent=watch.sent_bytes,
        host=watch.host_seconds,
        tensors=watch.saved_tensors,
    )


def _announce(choice: Choice) -> None:
    sys.stdout.write(f"overspill: {choice}\n")
