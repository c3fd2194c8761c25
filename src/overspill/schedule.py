"""The order in which a model calls its units: guessed at first, learned as it runs, corrected whenever it is wrong."""

import threading
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Step = TypeVar("Step")


class Schedule(Generic[Step]):
    """What comes next, told from the last two steps of the calling thread.

    Two steps are context enough for blocks that run twice in a pass, for an encoder that runs once and a decoder that
    runs on, and for the way from a pass's last unit to the first of the next, where `end_pass` does not part them. A
    wrong guess costs a fetch, never a bit.
    """

    def __init__(self, order: Sequence[Step]) -> None:
        self._length = len(order)
        self._after: dict[Step, Step | None] = {step: order[(i + 1) % len(order)] for i, step in enumerate(order)}
        self._after_two: dict[tuple[Step | None, Step], Step | None] = {}
        self._seen = threading.local()

    def note(self, step: Step) -> None:
        """This thread has come to `step`."""
        before, last = getattr(self._seen, "steps", (None, None))
        if last is not None:
            self._after[last] = step
            if before is not None:
                self._after_two[before, last] = step
        self._seen.steps = (last, step)

    def end_pass(self) -> None:
        """Nothing follows the steps that were taken so far: whoever comes next begins anew."""
        before, last = getattr(self._seen, "steps", (None, None))
        if last is not None:
            self._after[last] = None
            if before is not None:
                self._after_two[before, last] = None
        self._seen.steps = (None, None)

    def upcoming(self) -> Iterator[Step]:
        """The steps that this thread is likely to take next, nearest first; as many as there are steps."""
        before, last = getattr(self._seen, "steps", (None, None))
        if last is None:
            return
        for _ in range(self._length):
            following = self._after_two.get((before, last), self._after[last])
            if following is None:
                return
            before, last = last, following
            yield following
