"""Writes docs/reference.md from the docstrings of what is public: `make docs`.

A docstring is prose, then sections: `Args:`, `Raises:` (a name, a colon, what it means), `Returns:` and `Example:`. The
examples are run by the tests, one after the other, as all Python on the pages of the docs is.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import overspill
from overspill import errors

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

GROUPS = {
    "Plan": ("empty_weights", "plan", "Plan"),
    "Load": ("from_pretrained", "load", "adopt"),
    "Offload, and undo": ("offload", "Offloaded", "restore"),
    "Save": ("save", "state_dict"),
    "Train": ("offload_training", "offload_activations", "HostAdamW"),
    "See what happens": ("trace", "report"),
}
"""The public names by what they are for. Returned classes that are not public follow the function that returns them."""
BESIDE = {
    "Plan": ("overspill.plan.Placement", "overspill.units.Unit", "overspill.plan.Tier", "overspill.plan.Rates"),
    "state_dict": ("overspill.saving.StateDict",),
    "report": ("overspill.reporting.Report",),
}
INSIDE = {
    *("Plan.check", "Plan.of_places", "Rates.assumed", "Rates.of"),
    *("HostAdamW.name_of", "HostAdamW.refuse_sparse_gradient", "HostAdamW.update"),
}
"""Methods that are there for other modules of the library, and not shown."""
COMPAT = ("overspill.compat.accelerate", "overspill.compat.nanomodel", "overspill.compat.megatron")

BEGINNING = """\
# Reference

Every public name, as its docstring has it. This page is made by `make docs`; the [guides](index.md) tell what to use
when. `help(overspill.plan)` shows the same.

The examples run one after the other, on these checkpoints:

```python
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import overspill


def build():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])


overspill.save(build(), "checkpoint")
config = LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
)
LlamaForCausalLM(config).save_pretrained("llama")
```
"""

WIDTH = 120
_SECTION = re.compile(r"^(Args|Returns|Raises|Example):\n((?:[ ]{4}.*\n|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^(\S[^:]*): (.*\n(?:[ ]{4,}.*\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Described:
    """A docstring, taken apart."""

    prose: str
    args: dict[str, str]
    returns: str
    raises: dict[str, str]
    example: str

    @classmethod
    def of(cls, thing: Any) -> "Described":
        text = (inspect.getdoc(thing) or "") + "\n"
        sections = {name: textwrap.dedent(content) for name, content in _SECTION.findall(text)}
        return cls(
            prose=_SECTION.sub("", text).strip(),
            args=_entries(sections.get("Args", "")),
            returns=_joined(sections.get("Returns", "")),
            raises=_entries(sections.get("Raises", "")),
            example=sections.get("Example", "").strip("\n"),
        )

    def rendered(self) -> Iterator[str]:
        """Paragraphs of Markdown."""
        yield self.prose
        if self.args:
            yield "\n".join(f"- `{name}`: {text}" for name, text in self.args.items())
        if self.returns:
            yield f"**Returns** {self.returns}"
        if self.raises:
            yield "**Raises**\n\n" + "\n".join(f"- `{name}`: {text}" for name, text in self.raises.items())
        if self.example:
            yield f"```python\n{self.example}\n```"


def _entries(section: str) -> dict[str, str]:
    return {name: _joined(text) for name, text in _ENTRY.findall(section)}


def _joined(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------- signatures, as they are written


def _definition(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def is_context(function: Any) -> bool:
    """Whether it is a generator made a context manager, whose annotation says what it yields."""
    return any(ast.unparse(decorator) == "contextmanager" for decorator in _definition(function).decorator_list)


def signature(function: Any, name: str) -> str:
    """`name(arguments) -> result`, an argument a line if it is long."""
    definition = _definition(function)
    arguments = [text for text in _arguments(definition.args) if text not in ("self", "cls")]
    result = "" if definition.returns is None or is_context(function) else f" -> {_type(definition.returns)}"
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) <= WIDTH - 4:
        return line
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{inner}){result}"


def _arguments(found: ast.arguments) -> Iterator[str]:
    positional = [*found.posonlyargs, *found.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(found.defaults))
    for argument, default in zip(positional, [*missing, *found.defaults], strict=True):
        yield _argument(argument, default)
    if found.vararg is not None:
        yield "*" + _argument(found.vararg, None)
    elif found.kwonlyargs:
        yield "*"
    for argument, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        yield _argument(argument, default)
    if found.kwarg is not None:
        yield "**" + _argument(found.kwarg, None)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    annotated = argument.arg if argument.annotation is None else f"{argument.arg}: {_type(argument.annotation)}"
    if default is None:
        return annotated
    return f"{annotated}{' = ' if argument.annotation else '='}{ast.unparse(default)}"


def _type(annotation: ast.expr) -> str:
    """As it is written, less the quotes around what is defined further down."""
    return str(annotation.value) if isinstance(annotation, ast.Constant) else ast.unparse(annotation)


# ---------------------------------------------------------------- what is described


def _function(function: Any, name: str, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}"
    kind = "with " if is_context(function) else ""
    yield textwrap.indent(kind + signature(function, name), "    ")
    yield from Described.of(function).rendered()


def _class(described: type, name: str, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}"
    if "__init__" in vars(described) and not hasattr(described, "__dataclass_fields__"):
        yield textwrap.indent(signature(described.__init__, name), "    ")  # type: ignore[misc]  # its own, as written
    yield from Described.of(described).rendered()
    if values := list(_values(described)):
        yield "\n".join(values)
    for method, function in methods(described).items():
        yield from _function(function, f"{name}.{method}", level + 1)


def methods(described: type) -> dict[str, Any]:
    """The methods of a class that are for users: its own, with a docstring."""
    own = {name: getattr(value, "__func__", value) for name, value in vars(described).items() if name[0] != "_"}
    return {
        name: value
        for name, value in own.items()
        if inspect.isfunction(value) and value.__doc__ and f"{described.__name__}.{name}" not in INSIDE
    }


def _values(described: type) -> Iterator[str]:
    """Fields, with the string that follows them, and properties."""
    body = _definition(described).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = "" if statement.value is None else f" = {ast.unparse(statement.value)}"
            yield _value(f"{statement.target.id}: {ast.unparse(statement.annotation)}{default}", _string(after))
        elif isinstance(statement, ast.Assign):
            yield _value(ast.unparse(statement), _string(after))
        elif isinstance(statement, ast.FunctionDef) and _is_property(statement):
            returned = "" if statement.returns is None else f": {ast.unparse(statement.returns)}"
            yield _value(f"{statement.name}{returned}", ast.get_docstring(statement) or "")


def _is_property(function: ast.FunctionDef) -> bool:
    kinds = {ast.unparse(decorator) for decorator in function.decorator_list}
    return bool(kinds & {"property", "cached_property"}) and not function.name.startswith("_")


def _string(statement: ast.stmt | None) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _value(declared: str, text: str) -> str:
    return f"- `{declared}`" + (f": {_joined(text)}" if text else "")


def _thing(thing: Any, name: str, level: int = 3) -> Iterator[str]:
    return (_class if inspect.isclass(thing) else _function)(thing, name, level)


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _verbs() -> Iterator[str]:
    listed = {name for names in GROUPS.values() for name in names}
    if strays := listed ^ (set(overspill.__all__) - {"errors", "__version__"}):
        raise SystemExit(f"tools/reference.py has no group for these public names, or they are gone: {sorted(strays)}")
    for title, names in GROUPS.items():
        yield f"## {title}"
        for name in names:
            yield from _thing(getattr(overspill, name), f"overspill.{name}")
            for path in BESIDE.get(name, ()):
                yield from _thing(_found(path), path.rpartition(".")[2], level=4)


def _errors() -> Iterator[str]:
    yield "## Errors"
    yield (
        "All are in `overspill.errors`. A message names the culprit (file, tensor, key, device) and the cure; after an "
        "error the model is as it was."
    )
    yield "\n".join(_tree(errors.OverspillError, 0))


def _tree(error: type[BaseException], depth: int) -> Iterator[str]:
    also = [base.__name__ for base in error.__bases__ if base.__module__ == "builtins" and base is not Exception]
    kind = f" (a `{also[0]}`, too)" if also else ""
    yield f"{'  ' * depth}- `{error.__name__}`{kind}: {_joined(inspect.getdoc(error) or '')}"
    for heir in error.__subclasses__():
        if heir.__module__ == errors.__name__:
            yield from _tree(heir, depth + 1)


def public_names(module: ModuleType) -> list[str]:
    """What a module of other libraries' names offers."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def _compat() -> Iterator[str]:
    for path in COMPAT:
        module = importlib.import_module(path)
        yield f"## {path}"
        yield re.sub(r"(?s)\n\nNote: .*", "", inspect.getdoc(module) or "").strip()
        for name in public_names(module):
            yield from _thing(getattr(module, name), name)


def reference() -> str:
    """The page."""
    return "\n\n".join([BEGINNING.rstrip("\n"), *_verbs(), *_errors(), *_compat()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}\n")
