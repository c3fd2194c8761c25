"""docs/reliability.md names tests: each is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


@pytest.mark.parametrize("named", sorted(set(re.findall(r"tests/[\w/]+\.py(?:::\w+)?", PAGE))))
def test_what_the_page_names_is_there(named: str) -> None:
    file, _, function = named.partition("::")
    source = (ROOT / file).read_text()
    assert not function or f"def {function}(" in source


def test_the_page_has_all_twelve_promises() -> None:
    assert re.findall(r"^\| \*\*(\d+)\.", PAGE, re.MULTILINE) == [str(number) for number in range(1, 13)]
