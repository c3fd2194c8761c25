"""The changes that `make mutants` makes: each is another program, and what no test could notice is left alone."""

import textwrap

from mutations import mutants_of

SOURCE = textwrap.dedent(
    '''
    """Prose – with a dash of two bytes."""
    LIMIT = 3

    class Shelf:
        room: int = 4

        def take(self, size: int | None = None) -> "int | None":
            """One word."""
            assert size != 7, f"{size + 1} is odd"
            if size is None or not self.room:
                return
            self.room -= size
            "–", self.note(max(size, 2), *zip(self, self, strict=True))
            if self.room < 0:
                raise ValueError(f"{size - 1} too many" + "!")
            return self.room
    '''
)


def test_each_change_is_made_where_it_says() -> None:
    found = {(mutant.old, mutant.new) for mutant in mutants_of(SOURCE)}
    assert found == {
        ("size is None or not self.room", "(size is None and (not self.room))"),
        ("size is None", "(size is not None)"),
        ("not self.room", "(self.room)"),
        ("return", "pass"),
        ("self.room -= size", "pass"),
        ("self.room -= size", "self.room += size"),
        ('"–", self.note(max(size, 2), *zip(self, self, strict=True))', "pass"),
        ("max(size, 2)", "(min(size, 2))"),
        ("2", "(3)"),
        ("2", "(1)"),
        ("self.room < 0", "(self.room <= 0)"),
        ("0", "(1)"),
        ("0", "(-1)"),
        ('raise ValueError(f"{size - 1} too many" + "!")', "pass"),
        ("return self.room", "return None"),
    }
    assert {mutant.function for mutant in mutants_of(SOURCE)} == {"Shelf.take"}


def test_each_change_is_another_program() -> None:
    original = compile(SOURCE, "shelf.py", "exec")
    for mutant in mutants_of(SOURCE):
        assert compile(mutant.apply(SOURCE), "shelf.py", "exec") != original, mutant
