"""Follows a pickle's instructions without carrying them out: does it stay within what a dict of tensors needs?

Note: what torch.load(weights_only=True) leaves open. It calls nothing that could run code. But a megabyte of
instructions can nest tuples a million deep, and the stack overflows where one is hashed; a single one can ask for a
`bytearray` of all memory; a few can copy a long list, again and again. So each value is followed through the stack and
the memo, as little of it as tells these apart: how deep its tuples are nested, and what copying it would cost.
"""

import pickletools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

_DEEPEST = 100
_COPIED_PER_BYTE = 4  # `torch.save` calls a function with what stands before the call, so with less than was read
_COPIED_ANYWAY = 1 << 16


class PickleRefusedError(Exception):
    """The pickle is none that `torch.save` would have written. The message says why."""


@dataclass(slots=True)
class _Value:
    text: int = 0
    """The length of a string."""
    parts: list["_Value"] = field(default_factory=list)
    """What a container holds."""
    depth: int = 0
    """Of nested tuples, the only containers that can be hashed."""


_CONSTANT = _Value()


def check_pickle(pickle: bytes) -> None:
    """Raise PickleRefusedError for what would crash the process or fill its memory; ValueError for what is no pickle.

    What is not allowed to be called is left for torch to refuse.
    """
    check = _Check(_COPIED_ANYWAY + _COPIED_PER_BYTE * len(pickle))
    for opcode, argument, position in pickletools.genops(pickle):
        step = _STEPS.get(opcode.name)
        if step is None:
            raise PickleRefusedError(f"its pickle has the instruction {opcode.name} at byte {position}")
        try:
            step(check, argument)
        except (IndexError, KeyError) as error:
            raise ValueError(f"nothing is there for the instruction {opcode.name} at byte {position}") from error


class _Check:
    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._stack: list[_Value] = []
        self._marked: list[list[_Value]] = []
        self._memo: dict[int, _Value] = {}

    def push_constant(self, _: Any) -> None:
        self._stack.append(_CONSTANT)

    def push_text(self, text: str) -> None:
        self._stack.append(_Value(text=len(text)))

    def push_container(self, _: Any) -> None:
        self._stack.append(_Value())

    def push_global(self, name: str) -> None:
        if name in ("builtins bytearray", "__builtin__ bytearray"):  # the latter is what protocol 2 calls it
            raise PickleRefusedError("its pickle makes a bytearray, which may be of any size")
        self._stack.append(_CONSTANT)

    def mark(self, _: Any) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[_Value]:
        parts, self._stack = self._stack, self._marked.pop()
        return parts

    def _last(self, count: int) -> list[_Value]:
        if count > len(self._stack):
            raise IndexError
        parts = self._stack[-count:]
        del self._stack[-count:]
        return parts

    def make_tuple(self, parts: list[_Value]) -> None:
        depth = 1 + max((part.depth for part in parts), default=0)
        if depth > _DEEPEST:
            raise PickleRefusedError(f"its pickle nests more than {_DEEPEST} tuples")
        self._stack.append(_Value(parts=parts, depth=depth))

    def put_into_container(self, parts: Iterable[_Value]) -> None:
        if self._stack[-1] is _CONSTANT:
            raise IndexError
        self._stack[-1].parts.extend(parts)

    def call(self, _: Any) -> None:
        """A function or a class with arguments, of which the result may hold copies."""
        _, arguments = self._last(2)
        self._spend(arguments, levels=3)  # three, since one call may pass a second function its arguments
        self._stack.append(_Value(parts=[*arguments.parts]))

    def set_state(self, _: Any) -> None:
        """An object with its state, which is copied into it."""
        target, state = self._last(2)
        self._spend(state, levels=3)
        self._stack.append(target)

    def _spend(self, value: _Value, levels: int) -> None:
        self._budget -= 1 + value.text
        if self._budget < 0:
            raise PickleRefusedError("its pickle copies far more than it holds")
        if levels:
            for part in value.parts:
                self._spend(part, levels - 1)

    def make_storage(self, _: Any) -> None:
        self._last(1)
        self._stack.append(_CONSTANT)

    def get(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def pass_by(self, _: Any) -> None:
        pass


_Step = Callable[[_Check, Any], None]

# Those that torch's own reader knows. A constant is never put into, so all of them can be one object.
_STEPS: dict[str, _Step] = {
    "PROTO": _Check.pass_by,
    "STOP": _Check.pass_by,
    "GLOBAL": _Check.push_global,
    "REDUCE": _Check.call,
    "NEWOBJ": _Check.call,
    "BUILD": _Check.set_state,
    "BINPERSID": _Check.make_storage,
    "MARK": _Check.mark,
    "TUPLE": lambda check, _: check.make_tuple(check._since_mark()),
    "TUPLE1": lambda check, _: check.make_tuple(check._last(1)),
    "TUPLE2": lambda check, _: check.make_tuple(check._last(2)),
    "TUPLE3": lambda check, _: check.make_tuple(check._last(3)),
    "EMPTY_TUPLE": _Check.push_constant,
    "APPEND": lambda check, _: check.put_into_container(check._last(1)),
    "APPENDS": lambda check, _: check.put_into_container(check._since_mark()),
    "SETITEM": lambda check, _: check.put_into_container(check._last(2)),
    "SETITEMS": lambda check, _: check.put_into_container(check._since_mark()),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _Check.push_container),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINSTRING"), _Check.push_text),
    **dict.fromkeys(
        ("NONE", "NEWFALSE", "NEWTRUE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"), _Check.push_constant
    ),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Check.get),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Check.put),
}
