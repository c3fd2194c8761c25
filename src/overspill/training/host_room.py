"""Whether host memory has room for what the blocks of a step will leave there, told by its first block."""

from collections.abc import Mapping

from torch import nn

from overspill.config import format_size
from overspill.devices import CPU, free_memory
from overspill.errors import BudgetError
from overspill.training.activations import Activations


class HostRoom:
    """What a block has left tells what those like it will leave: nobody knows more before a batch is there."""

    def __init__(self, activations: Activations, blocks: Mapping[str, nn.Module]) -> None:
        self._activations = activations
        kinds = [_kind(block) for block in blocks.values()]
        self._before = {name: index for index, name in enumerate(blocks)}
        self._behind = {name: kinds[index + 1 :].count(kinds[index]) for name, index in self._before.items()}

    def check(self, name: str, nbytes: int) -> None:
        """A block's call has sent `nbytes` away. Raises if as much of each one like it behind it would not fit."""
        behind = self._behind[name]
        needed = nbytes * behind
        if self._activations.file is not None or needed <= self._activations.unused_bytes:
            return
        free = free_memory(CPU) + self._activations.unused_bytes
        if needed > free:
            fitting = self._before[name] + 1 + int(free // nbytes)
            raise BudgetError(
                f"the activations of {len(self._before)} blocks do not fit in host memory: {name} left "
                f"{format_size(nbytes)}, so the {behind} like it behind it need {format_size(needed)}, where "
                f"{format_size(free)} are free. Pass layers={fitting}, recompute=True, which leaves a block's inputs "
                "only, or activations='disk'"
            )


def _kind(block: nn.Module) -> tuple[type, int]:
    """Blocks of one kind save alike. Those of a U-Net, say, have one class and are of many sizes."""
    return type(block), sum(parameter.nbytes for parameter in block.parameters())
