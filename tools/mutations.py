"""Small changes to a source file, each of which some test should notice."""

import ast
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change in the body of `function`: `new` in the place of `old`, which stands at `span` in the source."""

    function: str
    line: int
    last_line: int
    span: tuple[int, int]
    old: str
    new: str

    def apply(self, source: str) -> str:
        start, stop = self.span
        return source[:start] + self.new + source[stop:]

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{old}  ->  {new}" if len(old) <= 100 else f"{old[:97]}...  ->  {new[:100]}"


def mutants_of(source: str) -> list[Mutant]:
    """Every change that is made to `source`, from its top to its end."""
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]

    def position(line: int, byte: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:byte].decode())

    found = []
    for function, body in _functions(ast.parse(source)):
        for node, new in _changes(body):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            span = position(node.lineno, node.col_offset), position(node.end_lineno, node.end_col_offset)
            found.append(Mutant(function, node.lineno, node.end_lineno, span, source[slice(*span)], new))
    return sorted(found, key=lambda mutant: (mutant.span, mutant.new))


def _functions(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.Module]]:
    """The functions of a module and of its classes, by qualified name; those within functions are part of these."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, ast.Module(child.body, [])
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes below `node`, and what is written in their place."""
    for child in _children(node):
        if isinstance(child, ast.stmt):
            for new in _other_statements(child):
                yield child, new
        if isinstance(child, ast.expr):
            for other in _other_expressions(child):
                yield child, f"({ast.unparse(ast.fix_missing_locations(other))})"
        yield from _changes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """All but what no test could or should notice: types, decorators, assertions of any kind, the words of errors."""
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # zip's
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _other_statements(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Constant()):
            return  # a docstring
        case ast.Return(value=value):
            is_none = value is None or (isinstance(value, ast.Constant) and value.value is None)
            yield "pass" if is_none else "return None"
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield "pass"
        case ast.Assign(targets=targets):
            if any(isinstance(part, ast.Attribute | ast.Subscript) for target in targets for part in ast.walk(target)):
                yield "pass"
    if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        other = copy.deepcopy(node)
        other.op = _OPERATORS[type(node.op)]()
        yield ast.unparse(other)


def _other_expressions(node: ast.expr) -> Iterator[ast.expr]:
    other = copy.deepcopy(node)
    match node, other:
        case ast.Compare(ops=ops), ast.Compare():
            for at, operator in enumerate(ops):
                changed = copy.deepcopy(other)
                changed.ops[at] = _COMPARISONS[type(operator)]()
                yield changed
        case ast.BinOp(op=operator), ast.BinOp() if type(operator) in _OPERATORS:
            other.op = _OPERATORS[type(operator)]()
            yield other
        case ast.BoolOp(op=operator), ast.BoolOp():
            other.op = ast.And() if isinstance(operator, ast.Or) else ast.Or()
            yield other
        case ast.UnaryOp(op=ast.Not() | ast.USub()), ast.UnaryOp():
            yield other.operand
        case ast.IfExp(), ast.IfExp():
            other.test = ast.UnaryOp(ast.Not(), other.test)
            yield other
        case ast.Call(func=ast.Name(id=name)), ast.Call() if name in _FUNCTIONS:
            other.func = ast.Name(_FUNCTIONS[name])
            yield other
        case ast.Constant(value=bool(value)), _:
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value), _:
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
