"""Straight lines through what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """The straight line through points, by least squares of the relative distances."""

    start: float
    slope: float
    deviation: float
    """The largest distance of a point from it, in parts of what it says."""

    @classmethod
    def of(cls, xs: Sequence[float], ys: Sequence[float]) -> "Fit":
        weights = [1 / y**2 for y in ys]
        total = sum(weights)
        mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
        mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
        spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
        slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
        start = mean_y - slope * mean_x
        deviation = max(abs(y / (start + slope * x) - 1) for x, y in zip(xs, ys, strict=True))
        return cls(start, slope, deviation)

    def at(self, x: float) -> float:
        """What it says."""
        return self.start + self.slope * x


def steepest(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The largest growth of `ys` from one point to the next, by that of `xs`: 1 for what is proportional."""
    steps = zip(xs, xs[1:], ys, ys[1:], strict=False)
    return max((later / earlier) / (more / fewer) for fewer, more, earlier, later in steps)
