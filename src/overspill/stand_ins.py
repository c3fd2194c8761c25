"""Tensors that modules show for a while in the place of others: what is written to them goes when they go."""

import threading
from collections.abc import Iterable
from typing import Any, Final

NOTHING: Final = object()
"""In the place of a tensor: no entry of that name."""


class StandIns:
    """Within, entries of modules' tables show other tensors. Afterwards they show what they showed before.

    Every thread sees them, so no two threads have any at the same time: they may be of one module.
    """

    def __init__(self, shown: Iterable[tuple[dict[str, Any], str, object]]) -> None:
        self._shown = list(shown)
        self._under: list[tuple[dict[str, Any], str, object]] = []

    def __enter__(self) -> None:
        _one_by_one.acquire()
        with _tables:
            self._under = [(table, name, table.get(name, NOTHING)) for table, name, _ in self._shown]
            for table, name, tensor in self._shown:
                _put(table, name, tensor)
            _standing.append(self)

    def __exit__(self, *exception: object) -> None:
        with _tables:
            _standing.remove(self)
            for table, name, tensor in self._under:
                _put(table, name, tensor)
        _one_by_one.release()

    def put_back(self, table: dict[str, Any], name: str, shown: object, home: object) -> None:
        """Leave `home` behind and not `shown`, if that was there."""
        self._under = [
            (table, name, home) if entry[0] is table and entry[1] == name and entry[2] is shown else entry
            for entry in self._under
        ]


_one_by_one: Final = threading.RLock()
_tables: Final = threading.RLock()
_standing: Final[list[StandIns]] = []


def take_back(table: dict[str, Any], name: str, shown: object, home: object) -> None:
    """Show `home` where `shown` is, be it that something stands in its place: that may be another thread's."""
    if table.get(name) is shown:  # as nearly always
        table[name] = home
    elif _standing:
        with _tables:
            if table.get(name) is shown:
                table[name] = home
            for stand_ins in _standing:
                stand_ins.put_back(table, name, shown, home)


def _put(table: dict[str, Any], name: str, tensor: object) -> None:
    if tensor is NOTHING:
        table.pop(name, None)
    else:
        table[name] = tensor
