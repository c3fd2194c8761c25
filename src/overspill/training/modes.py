"""What can be done with the tensors that a block saves for its backward, and what that costs."""

from enum import Enum


class Mode(Enum):
    """How a block's saved tensors are looked after."""

    KEEP = "keep"  # device memory for all of them
    OFFLOAD = "offload"  # each crosses the link twice
    RECOMPUTE = "recompute"  # the block's forward is computed twice; only its inputs are kept
    RECOMPUTE_OFFLOAD = "recompute + offload"  # as before, and the inputs cross the link twice

    @property
    def recomputes(self) -> bool:
        return self in (Mode.RECOMPUTE, Mode.RECOMPUTE_OFFLOAD)

    @property
    def leaves(self) -> bool:
        """Whether anything crosses the link."""
        return self in (Mode.OFFLOAD, Mode.RECOMPUTE_OFFLOAD)
