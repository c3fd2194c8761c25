"""docs/reference.md is what the docstrings say, and they say what each argument is."""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import overspill
from overspill import errors

ROOT = Path(__file__).parent.parent


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script: Any = _script()


def public() -> Iterator[tuple[str, Any]]:
    """Every function, and every class that is called, by its name."""
    for module in (overspill, *map(importlib.import_module, script.COMPAT)):
        for name in script.public_names(module):
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value):
                for method, function in script.methods(value).items():
                    yield f"{module.__name__}.{name}.{method}", function
    yield "overspill.HostAdamW", overspill.HostAdamW


PUBLIC = dict(public())


def test_the_page_is_what_the_docstrings_say() -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.reference(), "write it anew: make docs"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_says_what_each_argument_is_and_no_other(name: str) -> None:
    parameters = [
        parameter for parameter in inspect.signature(PUBLIC[name]).parameters if parameter not in ("self", "cls")
    ]
    assert list(script.Described.of(PUBLIC[name]).args) == parameters


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_names_errors_that_there_are(name: str) -> None:
    raised = script.Described.of(PUBLIC[name]).raises
    assert [
        error for error in raised if not hasattr(errors, error) and error not in ("ImportError", "ValueError")
    ] == []


@pytest.mark.parametrize("name", [name for name in overspill.__all__ if inspect.isfunction(getattr(overspill, name))])
def test_each_verb_has_an_example(name: str) -> None:
    assert f"overspill.{name}(" in script.Described.of(getattr(overspill, name)).example


def test_every_public_name_and_every_error_is_on_the_page() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    headings = set(re.findall(r"^#+ (\S+)$", page, re.MULTILINE))
    assert {f"overspill.{name}" for name in overspill.__all__ if name not in ("errors", "__version__")} <= headings
    for path in script.COMPAT:
        assert set(script.public_names(importlib.import_module(path))) <= headings
    tree = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    assert [name for name in tree if f"- `{name}`" not in page] == []


def test_sections_of_a_docstring_are_told_apart() -> None:
    def documented() -> None:
        """Says what it is.

        More.

        Args:
            first: One thing,
                on two lines: with a colon.
            second: Another.

        Returns:
            A result.

        Raises:
            ValueError: Never.

        Example:
            if documented():
                pass
        """

    found = script.Described.of(documented)
    assert found.prose == "Says what it is.\n\nMore."
    assert found.args == {"first": "One thing, on two lines: with a colon.", "second": "Another."}
    assert (found.returns, found.raises) == ("A result.", {"ValueError": "Never."})
    assert found.example == "if documented():\n    pass"
