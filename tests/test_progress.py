"""The bar of long work: seen on a terminal, and never a reason to fail."""

import io
import sys

import pytest

from overspill.progress import Progress


class Terminal(io.StringIO):
    """A terminal that can go away."""

    error: Exception | None = None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def opened(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for stderr. In the test itself, since pytest takes stderr back after the fixtures."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_a_bar_shows_what_is_done_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    with Progress(2048, wanted=False) as bar:
        bar.show(2048)
    assert terminal.getvalue() == ""
    with Progress(2048, wanted=True, what="saving") as bar:
        bar.show(1024)
        bar.show(2048)
    assert "saving" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("closed")])
@pytest.mark.parametrize("shown", [0, 1])
def test_a_terminal_that_goes_away_ends_the_bar_and_not_the_work(
    shown: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = opened(monkeypatch)
    with Progress(10**9, wanted=True) as bar:
        for done in range(shown):
            bar.show(done)
        assert "loading" in terminal.getvalue()
        terminal.error = error
        for done in range(10**8, 10**9, 10**8):
            bar.show(done)
