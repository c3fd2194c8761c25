"""A bar for long work, on a terminal; nothing in a log."""

from types import TracebackType

from tqdm import tqdm


class Progress:
    """Bytes done of a total, with their rate. A terminal that fails ends the bar, not the work."""

    def __init__(self, total: int, wanted: bool, what: str = "loading") -> None:
        # disable=None: a bar on a terminal only.
        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None if wanted else True)

    def show(self, done: int) -> None:
        """So many bytes are done by now."""
        try:
            self._bar.update(done - self._bar.n)
        except (OSError, ValueError):  # closed, or gone with its connection
            self._bar.disable = True

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._bar.close()
        except (OSError, ValueError):
            self._bar.disable = True
