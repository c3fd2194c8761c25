"""The order in which a model calls its units: guessed at first, learned as it runs, corrected whenever it is wrong."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Step = TypeVar("Step")


@dataclass
class Line(Generic[Step]):
    """The last two steps of one sequence."""

    before: Step | None = None
    last: Step | None = None


class Schedule(Generic[Step]):
    """What comes next, told from the last two steps of a line.

    Two steps are context enough for blocks that run twice in a pass, for an encoder that runs once and a decoder that
    runs on, and for the way from a pass's last unit to the first of the next, where `end_pass` does not part them. A
    wrong guess costs a fetch, never a bit. Each thread has a line of its own; a backward, which may run in a thread of
    autograd's, goes on with the line of its forward.
    """

    def __init__(self, guess: Mapping[Step, Step]) -> None:
        self._after: dict[Step, Step | None] = dict(guess)
        self._after_two: dict[tuple[Step | None, Step], Step | None] = {}
        self._mine = threading.local()

    def line(self) -> Line[Step]:
        """The calling thread's."""
        if not hasattr(self._mine, "line"):
            self._mine.line = Line[Step]()
        line: Line[Step] = self._mine.line
        return line

    def note(self, step: Step, line: Line[Step]) -> None:
        """The line has come to `step`."""
        self._learn(line, step)
        line.before, line.last = line.last, step

    def end_pass(self) -> None:
        """Nothing follows the steps that this thread took so far: whoever comes next begins anew."""
        line = self.line()
        self._learn(line, None)
        line.before = line.last = None

    def _learn(self, line: Line[Step], following: Step | None) -> None:
        if line.last is not None:
            self._after[line.last] = following
            if line.before is not None:
                self._after_two[line.before, line.last] = following

    def upcoming(self, line: Line[Step]) -> Iterator[Step]:
        """The steps that are likely to come next, nearest first; as many as there are steps."""
        before, last = line.before, line.last
        for _ in range(len(self._after)):
            if last is None:
                return
            following = self._after_two.get((before, last), self._after.get(last))
            if following is None:
                return
            before, last = last, following
            yield following
