"""How large a window must or should be for the units that stream through it, and what it can keep besides."""

from collections.abc import Sequence

from overspill.units import Unit, root_needs

USUAL_DEPTH = 3
"""Units in the window: one that computes, one that has arrived, one on its way. Two are nearly as fast."""

_AMPLE_DEPTH = 5  # units in a row that a window holds which no budget limits
_STANDS_OUT = 2  # a unit more than this many times as large as the one in the middle is unlike the blocks around it


def least_window(units: Sequence[Unit]) -> int:
    """The smallest window that can stream `units`: what the neediest root needs at once."""
    return max(root_needs(units).values(), default=0)


def usual_window(units: Sequence[Unit]) -> int:
    """The window that can stream `units` and hold any three of them in a row, so that copies go on meanwhile."""
    return max(least_window(units), in_a_row(units, USUAL_DEPTH))


def ample_window(units: Sequence[Unit]) -> int:
    """The window where no budget limits it: room for any five units in a row, beside the few that stand out.

    An embedding of several blocks' size takes as long to copy as those blocks: no computation hides that. It is cheaper
    to keep it in the window. Five blocks are more than streaming needs, so one or two are kept as well, which leaves
    the link some slack where copying and computing take equally long.
    """
    middle = sorted(unit.nbytes for unit in units)[len(units) // 2] if units else 0
    usual = [unit for unit in units if unit.nbytes <= _STANDS_OUT * middle]
    if len(units) - len(usual) > len(units) // 4:  # then that is how the model is, and nothing stands out
        usual = list(units)
    large = sum(unit.nbytes for unit in units) - sum(unit.nbytes for unit in usual)
    return max(least_window(units), large + in_a_row(usual, _AMPLE_DEPTH))


def kept_in_window(units: Sequence[Unit], window: int) -> list[Unit]:
    """Those of `units` that a window can hold for good while the others stream through it three deep.

    First the largest, as many of them as make room for the rest to stream; then whatever fits, the first ones first.
    """
    by_size = sorted(units, key=lambda unit: -unit.nbytes)
    needs = root_needs(units)
    shared = max((needs[root] for unit in units for root in unit.roots if needs[root] > unit.nbytes), default=0)

    def stream(largest: int) -> int:
        return max(USUAL_DEPTH * by_size[largest].nbytes, shared) if largest < len(by_size) else 0

    held, kept = 0, 0
    for count in range(len(by_size)):
        held += by_size[count].nbytes
        if held + stream(count + 1) <= window:
            kept = count + 1
    large = {unit.name: unit for unit in by_size[:kept]}
    left = window - sum(unit.nbytes for unit in large.values()) - stream(kept)
    for unit in units:
        if unit.name not in large and unit.nbytes <= left:
            large[unit.name] = unit
            left -= unit.nbytes
    return list(large.values())


def in_a_row(units: Sequence[Unit], depth: int) -> int:
    """The most bytes that `depth` units in a row have. The first follows the last, as it does in the next pass."""
    sizes = [unit.nbytes for unit in units]
    if len(sizes) <= depth:
        return sum(sizes)
    ring = sizes + sizes[: depth - 1]
    return max(map(sum, zip(*(ring[start:] for start in range(depth)), strict=False)))


def neediest(units: Sequence[Unit]) -> str:
    """The root that needs the most at once."""
    needs = root_needs(units)
    return max(needs, key=lambda root: needs[root], default="")
