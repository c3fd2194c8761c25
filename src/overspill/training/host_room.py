"""Whether host memory has room for what the blocks of a step will leave there, told by its first block."""

from overspill.config import format_size
from overspill.devices import CPU, free_memory
from overspill.errors import BudgetError
from overspill.training.activations import Activations


class HostRoom:
    """Watches one step's blocks from the first on: nobody knows before a batch is there what its activations take."""

    def __init__(self, activations: Activations, blocks: int) -> None:
        self._activations, self._blocks = activations, blocks
        self._left = blocks

    def begin_step(self) -> None:
        """A forward with gradients begins."""
        self._left = self._blocks

    def called(self, name: str, nbytes: int) -> None:
        """A block's call has sent `nbytes` away. Raises if as much of each block behind it would not fit."""
        self._left -= 1
        needed = nbytes * max(self._left, 0)
        if self._activations.file is not None or needed <= self._activations.unused_bytes:
            return
        free = free_memory(CPU) + self._activations.unused_bytes
        if needed > free:
            fitting = self._blocks - self._left + int(free // nbytes)
            raise BudgetError(
                f"the activations of {self._blocks} blocks do not fit in host memory: {name} left "
                f"{format_size(nbytes)}, so the {self._left} behind it need {format_size(needed)}, where "
                f"{format_size(free)} are free. Pass layers={fitting}, recompute=True, which leaves a block's inputs "
                "only, or activations='disk'"
            )
