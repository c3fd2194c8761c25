"""What needs streamed units, and in which order it is likely to at first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from overspill.devices import running_backward
from overspill.streamed import StreamedUnit


class Phase(Enum):
    """What a root's units are needed for. Passes with and without gradients have orders of their own."""

    INFERENCE = "a forward without gradients"
    FORWARD = "a forward with gradients"
    BACKWARD = "a backward, and the forwards that are computed once more in it"

    @classmethod
    def of_a_call(cls, *, with_grad: bool) -> "Phase":
        """What a call that begins now needs its units for."""
        if not with_grad:
            return cls.INFERENCE
        return cls.FORWARD if running_backward() is None else cls.BACKWARD


@dataclass(eq=False)
class Root:
    """A module whose forward needs some units, all at once."""

    path: str
    module: nn.Module
    units: list[StreamedUnit] = field(default_factory=list)


@dataclass(eq=False)  # equal to itself alone: there is one of each, and finding it in a table costs little
class Step:
    """One need of a root's units."""

    root: Root
    phase: Phase


class Steps:
    """All steps there can be."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._of = {root: {phase: Step(root, phase) for phase in Phase} for root in roots}

    def __getitem__(self, need: tuple[Root, Phase]) -> Step:
        root, phase = need
        return self._of[root][phase]

    def guess(self) -> Mapping[Step, Step]:
        """What follows what: roots as they are defined; a backward goes the other way."""
        roots, after = list(self._of), {}
        for here, following in zip(roots, [*roots[1:], *roots[:1]], strict=True):
            after[self[here, Phase.INFERENCE]] = self[following, Phase.INFERENCE]
            after[self[here, Phase.FORWARD]] = self[following, Phase.FORWARD]
            after[self[following, Phase.BACKWARD]] = self[here, Phase.BACKWARD]
        if roots:
            after[self[roots[-1], Phase.FORWARD]] = self[roots[-1], Phase.BACKWARD]
            after[self[roots[0], Phase.BACKWARD]] = self[roots[0], Phase.FORWARD]
        return after
