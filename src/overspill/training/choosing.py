"""Keep, offload or recompute, for each block: the fastest choice within a budget. A pure function of measurements.

Note: the model of a step. Copies run beside the computation, so a forward takes the longer of its computing and of what
leaves, and a backward the longer of its computing, replays included, and of what comes back. That holds block by block,
not over all of them: what waits for its copy takes device memory, so little may wait. Where nothing is brought back
ahead of its need, which takes least memory, a backward takes both together. Nor is a block done before the
host has queued it, which takes longer the more tensors are to be sent one by one. Memory is highest either
when the forward ends, with all that the blocks keep, or in some block's backward, with what the blocks before it keep,
the gradients of those behind it, and what its own backward needs. All else that the step takes (weights, the head, what
operations need for a moment) is the same for every choice, and is known from the one that was measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations_with_replacement, pairwise

from overspill.config import format_size
from overspill.errors import BudgetError
from overspill.training.modes import Mode


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """What one block's step costs, as measured."""

    name: str
    forward: float
    """Seconds."""
    backward: float | None = None
    """Seconds, where they are known. It computes twice as much as the forward, but is no Python."""
    saved: int
    """Bytes that its backward needs."""
    largest: int = 0
    """Bytes of the largest tensor among them."""
    inputs: int
    """Bytes of its inputs, which are not another block's to keep."""
    gradients: int = 0
    """Bytes of gradients that it leaves on the device."""
    streamed: int = 0
    """Bytes of weights that come for its forward, and again for its backward."""
    replay: float | None = None
    """Seconds of its replay where what leaves makes that shorter than its forward."""
    sent: int = 0
    """Bytes that leave for that replay, its inputs among them."""
    host: float = 0.0
    """Seconds in which the host queues a forward. Its backward, which is no Python, takes as long: 28 Llama blocks that
    were checkpointed took 0.068 s, and 0.152 s for replays and backwards (3B size, 2,048 tokens, H200, torch 2.11)."""
    tensors: int = 0
    """How many tensors are saved that are large enough to leave."""

    def computes_backward(self) -> float:
        """Seconds, without a replay. It may have waited for other things when it was measured, so no more than this."""
        twice = 2 * self.forward
        return twice if self.backward is None else min(self.backward, twice)

    def keeps(self, mode: Mode) -> int:
        """Device memory from its forward to its backward."""
        return {Mode.KEEP: self.saved, Mode.RECOMPUTE: self.inputs}.get(mode, 0)

    def moves(self, mode: Mode) -> int:
        """Bytes that cross the link, once each way."""
        return {Mode.OFFLOAD: self.saved, Mode.RECOMPUTE_OFFLOAD: max(self.inputs, self.sent)}.get(mode, 0)

    def replays(self, mode: Mode) -> float:
        """Seconds of being computed once more."""
        if not mode.recomputes:
            return 0.0
        return self.forward if mode is Mode.RECOMPUTE or self.replay is None else self.replay


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a step costs, as measured while all its blocks were in `measured_as`."""

    blocks: tuple[BlockCost, ...]
    peak: int
    """Bytes of device memory at its height."""
    between: int = 0
    """… and between the last block's forward and its backward, while the head and the loss are computed."""
    held: int = 0
    """Bytes that are there besides at that time, where inputs leave: those that were sent last."""
    link: float
    """Bytes a second, each way."""
    host_a_tensor: float = 0.0
    """Seconds of the host to send one tensor, or to bring it back."""
    slabs: int
    """Bytes on their way from a block's forward, or to its backward, at once."""
    ahead: bool = True
    """Whether what is offloaded is brought back before a backward asks for it."""
    measured_as: Mode = Mode.RECOMPUTE_OFFLOAD

    def seconds(self, modes: Sequence[Mode]) -> float:
        """How long the blocks take."""
        pairs = list(zip(self.blocks, modes, strict=True))
        moved = sum(block.moves(mode) for block, mode in pairs)
        streamed = sum(block.streamed for block in self.blocks)
        waits = [max(block.moves(mode) - self.slabs, 0) / self.link for block, mode in pairs]
        forward = sum(
            max(block.forward, wait, block.host + self._sends(block, mode))
            for (block, mode), wait in zip(pairs, waits, strict=True)
        )
        backward = sum(
            max(self._computes_backward(block, mode), wait, self._queues_backward(block, mode))
            for (block, mode), wait in zip(pairs, waits, strict=True)
        )
        # What leaves and what comes do not share the link: it carries as much each way.
        return max(forward, moved / self.link, streamed / self.link) + max(backward, (moved + streamed) / self.link)

    def _computes_backward(self, block: BlockCost, mode: Mode) -> float:
        """Seconds of the device, and of what it waits for where that is not ahead."""
        asked = block.moves(mode) / self.link if mode is Mode.OFFLOAD and not self.ahead else 0.0
        return block.computes_backward() + block.replays(mode) + asked

    def _queues_backward(self, block: BlockCost, mode: Mode) -> float:
        """Seconds of the host, its replay included."""
        return (2 if mode.recomputes else 1) * block.host + self._sends(block, mode)

    def _sends(self, block: BlockCost, mode: Mode) -> float:
        """Seconds of the host for what leaves one by one, or comes back so."""
        return block.tensors * self.host_a_tensor if mode is Mode.OFFLOAD else 0.0

    def memory(self, modes: Sequence[Mode]) -> int:
        """The most device memory that the step takes."""
        same = [self.measured_as] * len(self.blocks)
        between = max(self.between - sum(self._kept(same)), 0) + sum(self._kept(modes))
        between += self._held(modes)
        return max(between, max(self.peak - self._height(same), 0) + self._height(modes))

    def _kept(self, modes: Sequence[Mode]) -> list[int]:
        """What each block keeps from its forward to its backward."""
        return [block.keeps(mode) for block, mode in zip(self.blocks, modes, strict=True)]

    def _height(self, modes: Sequence[Mode]) -> int:
        before = list(accumulate(self._kept(modes), initial=0))
        behind = list(accumulate((block.gradients for block in reversed(self.blocks)), initial=0))[-2::-1]
        last = max((index for index, mode in enumerate(modes) if mode.leaves), default=len(modes))
        heights = [
            before[index] + behind[index] + self._working(block, mode)
            for index, (block, mode) in enumerate(zip(self.blocks, modes, strict=True))
        ]
        held = self._held(modes)
        return max([before[-1], *heights, *(height + held for height in heights[last + 1 :])])

    def _held(self, modes: Sequence[Mode]) -> int:
        """What was sent last, and is still on the device until the backward of the block that saved it."""
        pairs = zip(self.blocks, modes, strict=True)
        saved = max((block.saved for block, mode in pairs if mode is Mode.OFFLOAD), default=0)
        return max(min(self.slabs, saved), self.held if Mode.RECOMPUTE_OFFLOAD in modes else 0)

    def _working(self, block: BlockCost, mode: Mode) -> int:
        """What a block's own backward needs of its saved tensors.

        Of those that come back one by one: what is ahead, the two that an operation may need at once, and one that was
        gone already when the memory of the block that was measured was at its height.
        """
        if mode is not Mode.OFFLOAD:
            return block.saved
        ahead = max(self.slabs, block.largest) if self.ahead else 0
        return min(block.saved, ahead + 3 * block.largest)


@dataclass(frozen=True)
class Choice:
    """A mode for each block, and what is expected of it."""

    step: StepCost
    modes: tuple[Mode, ...]

    @property
    def seconds(self) -> float:
        return self.step.seconds(self.modes)

    @property
    def memory(self) -> int:
        return self.step.memory(self.modes)

    def __str__(self) -> str:
        lines = [f"{len(self.modes)} blocks, {format_size(self.memory)} expected, {self.seconds:.3f} s for the blocks"]
        for first, last, mode in self._runs():
            names = self.step.blocks[first].name
            if last != first:
                names += f" to {self.step.blocks[last].name}"
            saved = sum(block.saved for block in self.step.blocks[first : last + 1])
            asked = ", each tensor back when it is asked for" if mode is Mode.OFFLOAD and not self.step.ahead else ""
            lines.append(f"  {mode.value:19} {names} ({format_size(saved)} saved{asked})")
        return "\n".join(lines)

    def _runs(self) -> Iterator[tuple[int, int, Mode]]:
        """Blocks in a row that have the same mode: first, last."""
        first = 0
        for index, mode in enumerate(self.modes):
            if index + 1 == len(self.modes) or self.modes[index + 1] is not mode:
                yield first, index, mode
                first = index + 1


def choose(step: StepCost, budget: int, allowed: Sequence[Mode]) -> Choice:
    """The fastest modes of those allowed that stay within `budget` bytes of device memory."""
    starts = list(_arrangements(len(step.blocks), [mode for mode in _FROM_THE_FIRST if mode in allowed]))
    frugal = replace(step, ahead=False)
    for each in (step, frugal):
        fitting = [modes for modes in starts if each.memory(modes) <= budget]
        if fitting:
            return _fastest(each, fitting, budget, allowed)
    least = min(map(frugal.memory, starts))
    raise BudgetError(
        f"a training step takes {format_size(least)} of device memory at the least, and memory= allows "
        f"{format_size(budget)}. Allow more, make the batch smaller, or pass weights=True or double_buffering=False"
    )


def _fastest(step: StepCost, fitting: Sequence[list[Mode]], budget: int, allowed: Sequence[Mode]) -> Choice:
    """The best that comes of some modes that fit."""
    starts = sorted(fitting, key=lambda modes: _rank(step, modes))[:_TRIED]
    improved: list[list[Mode]] = [_improved(step, modes, budget, allowed) for modes in starts]
    best = min(improved, key=lambda modes: _rank(step, modes))
    return Choice(step, tuple(best))


_FROM_THE_FIRST = (Mode.RECOMPUTE_OFFLOAD, Mode.OFFLOAD, Mode.RECOMPUTE, Mode.KEEP)
"""What the first blocks save is needed last, so what takes least memory comes first."""

_PARTS = 16  # blocks, or groups of them, that arrangements are made of
_TRIED = 3  # arrangements that are improved block by block


def _arrangements(count: int, modes: Sequence[Mode]) -> Iterator[list[Mode]]:
    """Some blocks in the first mode, then some in the second, and so on."""
    size = -(-count // _PARTS)
    cuts = sorted({0, count, *range(0, count, size)})
    for ends in combinations_with_replacement(cuts, len(modes) - 1):
        edges = (0, *ends, count)
        yield [mode for mode, (start, end) in zip(modes, pairwise(edges), strict=True) for _ in range(start, end)]


def _improved(step: StepCost, start: list[Mode], budget: int, allowed: Sequence[Mode]) -> list[Mode]:
    """Change one block, or exchange two, as long as that is better."""
    modes, rank = start, _rank(step, start)
    while True:
        better = next(
            (
                changed
                for changed in (*_changes(modes, allowed), *_exchanges(modes))
                if _rank(step, changed) < rank and step.memory(changed) <= budget
            ),
            None,
        )
        if better is None:
            return modes
        modes, rank = better, _rank(step, better)


def _rank(step: StepCost, modes: Sequence[Mode]) -> tuple[float, int]:
    """Faster first. Where the longer of two hides a difference, whatever leaves less to do."""
    work = sum(block.moves(mode) for block, mode in zip(step.blocks, modes, strict=True))
    replayed = sum(block.replays(mode) for block, mode in zip(step.blocks, modes, strict=True))
    return round(step.seconds(modes), 9), int(work + replayed * step.link)


def _changes(modes: list[Mode], allowed: Sequence[Mode]) -> Iterator[list[Mode]]:
    for index, mode in enumerate(modes):
        for other in allowed:
            if other is not mode:
                yield [*modes[:index], other, *modes[index + 1 :]]


def _exchanges(modes: list[Mode]) -> Iterator[list[Mode]]:
    """Two neighbours in each other's place: what is kept should be needed soon."""
    for index in range(len(modes) - 1):
        if modes[index] is not modes[index + 1]:
            yield [*modes[:index], modes[index + 1], modes[index], *modes[index + 2 :]]
