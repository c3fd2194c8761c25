"""Hostile checkpoints by the thousand: right but for a lie or two, so that they get past the first checks."""

import copy
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from overspill.checkpoint.safetensors_header import DTYPES

# ---------------------------------------------------------------- safetensors files


def file_of(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file."""
    return len(header).to_bytes(8, "little") + header + data


_NAMES = ["w", "model.layers.0.weight", "", "ü", "\U0001f600", "a\nb", "__metadata__", "_", "\x7f", "\ud800"]
_TOKENS = ["-0", "NaN", "-Infinity", "1e2", "1e999", "01", "9" * 30, "9" * 5000, "[" * 5000, "[" * 150 + "]" * 150]
_TOKENS += [
    "true",
    "nul",
    '{"a":1,"a":2}',
    '"\\ud800"',
    '"\\u0000"',
    "/**/1",
    "'a'",
    "+1",
    ".5",
    "{}{}",
    "\x00",
    "\ufeff1",
]
_ODD: list[Any] = [
    -1,
    True,
    False,
    1.0,
    0,
    1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    None,
    "1",
    [],
    {},
    [[]],
]
_LENGTHS = [0, 1, 7, 8, 100_000_000, 100_000_001, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 8, 2**64 - 1]


class SafetensorsMaker:
    """Files that are right but for a lie or two: pure noise would never get past the first check."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def make(self) -> bytes:
        """One file."""
        chance = self._chance
        header, nbytes = self._tiled()
        lies = chance.choice([0, 1, 1, 1, 2, 3])
        tokens: list[str] = []
        for _ in range(lies):
            chance.choice([self._lie_in_entry, self._lie_in_range, self._lie_in_shape, self._lie_at_top])(
                header, tokens
            )
        text = json.dumps(
            header, ensure_ascii=chance.random() < 0.5, separators=chance.choice([(",", ":"), (", ", ": ")])
        )
        for number, token in enumerate(tokens):
            text = text.replace(f'"@{number}@"', token)
        raw = text.encode(errors="surrogatepass")
        if chance.random() < 0.2:
            raw = self._lie_in_text(raw)
        return self._lie_in_frame(file_of(raw, chance.randbytes(nbytes)))

    def _tiled(self) -> tuple[dict[str, Any], int]:
        chance = self._chance
        header: dict[str, Any] = {}
        position = 0
        for name in chance.sample(_NAMES[:6], chance.randint(0, 4)):
            dtype, shape = chance.choice(sorted(DTYPES)), [chance.randint(0, 3) for _ in range(chance.randint(0, 3))]
            end = position + DTYPES[dtype].itemsize * int(torch.tensor(shape, dtype=torch.int64).prod())
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
            position = end
        return header, position

    def _entry(self, header: dict[str, Any]) -> dict[str, Any]:
        entries = [entry for entry in header.values() if isinstance(entry, dict)]
        return self._chance.choice(entries) if entries else {}

    def _odd(self, tokens: list[str]) -> object:
        if self._chance.random() < 0.4:
            tokens.append(self._chance.choice(_TOKENS))
            return f"@{len(tokens) - 1}@"
        return copy.deepcopy(self._chance.choice(_ODD))  # the next lie may put something into it

    def _lie_in_entry(self, header: dict[str, Any], tokens: list[str]) -> None:
        entry = self._entry(header)
        field = self._chance.choice(["dtype", "shape", "data_offsets", "data_offsets", "extra"])
        if self._chance.random() < 0.15:
            entry.pop(field, None)
        elif field == "dtype":
            entry[field] = self._chance.choice(
                [*DTYPES, "F4", "F6_E2M3", "f32", "F31", {"F32": None}, self._odd(tokens)]
            )
        elif field == "extra" or self._chance.random() < 0.2:
            entry[field] = self._odd(tokens)
        else:
            values = list(entry[field]) if isinstance(entry.get(field), list) else []
            values.insert(self._chance.randint(0, len(values)), self._odd(tokens))
            entry[field] = values if self._chance.random() < 0.3 else values[:2]

    def _lie_in_range(self, header: dict[str, Any], tokens: list[str]) -> None:
        entry = self._entry(header)
        if not isinstance(entry.get("data_offsets"), list):
            return
        shift, values = self._chance.choice([-8, -4, -1, 1, 4, 8, 2**62, -(2**62)]), entry["data_offsets"]
        ends = [value for value in values if type(value) is int]
        forms = [
            [value + shift for value in ends],
            ends[::-1],
            [*ends[:1], *(v + shift for v in ends[1:])],
            [0, 0],
            ends[:1] * 2,
        ]
        entry["data_offsets"] = self._chance.choice(forms)

    def _lie_in_shape(self, header: dict[str, Any], tokens: list[str]) -> None:
        entry = self._entry(header)
        shapes = [
            [2**32, 2**32],
            [0, 2**62, 2**62],
            [2**62, 2**62, 0],
            [2**64],
            [1] * 70,
            [2**21] * 3,
            [],
            [0],
            [2**63, 0],
        ]
        entry["shape"] = self._chance.choice(shapes)

    def _lie_at_top(self, header: dict[str, Any], tokens: list[str]) -> None:
        chance = self._chance
        metadata = [{"format": "pt"}, {"a": 1}, {"\ud800": "x"}, {"x": "\udfff"}, "pt", None, [], self._odd(tokens)]
        if chance.random() < 0.4:
            header["__metadata__"] = chance.choice(metadata)
        elif header and chance.random() < 0.5:
            header[chance.choice(_NAMES)] = header.pop(chance.choice(sorted(header)))
        else:
            header[chance.choice(_NAMES)] = chance.choice(
                [["F32", [1], [0, 4]], self._odd(tokens), dict(self._entry(header))]
            )

    def _lie_in_text(self, raw: bytes) -> bytes:
        chance = self._chance
        place = chance.randint(0, len(raw))
        forms = [
            raw[:place] + chance.randbytes(chance.randint(1, 3)) + raw[place:],
            raw[:place] + raw[place + 1 :],
            raw[:place] + b"\xed\xa0\x80" + raw[place:],
            raw[:-1] + b"," + raw[1:],  # every key twice
            raw + chance.choice([b" ", b"\0", b"\n\t ", b"x", b"{}"]),
            chance.choice([b" ", b"\xef\xbb\xbf", b"\0"]) + raw,
            b"[" + raw + b"]",
            raw[:place],
        ]
        return chance.choice(forms)

    def _lie_in_frame(self, content: bytes) -> bytes:
        chance = self._chance
        kind = chance.random()
        if kind < 0.05:
            return chance.choice(_LENGTHS).to_bytes(8, "little") + content[8:]
        if kind < 0.1:
            length = int.from_bytes(content[:8], "little") + chance.choice([-1, 1, 2, 8])
            return (length % 2**64).to_bytes(8, "little") + content[8:]
        if kind < 0.15:
            return content[: chance.randint(0, len(content))]
        if kind < 0.2:
            return content + chance.randbytes(chance.randint(1, 9))
        return content


# ---------------------------------------------------------------- index files

_SHARDS = ["one.safetensors", "two.safetensors", "sub/three.safetensors", "./one.safetensors", "sub//three.safetensors"]
_TRICKS = [
    "../secret.safetensors",
    "sub/../../secret.safetensors",
    "..\\secret.safetensors",
    "/dev/zero",
    "/etc/passwd",
]
_TRICKS += [
    "C:\\secret.safetensors",
    "C:one.safetensors",
    "\\\\host\\share\\x.safetensors",
    "one.safetensors\0",
    "\ud800.bin",
]
_TRICKS += [
    "",
    ".",
    "..",
    "sub",
    "~/x.safetensors",
    "x" * 300 + ".safetensors",
    "model.safetensors.index.json",
    "no.safetensors",
]
_TRICKS += ["file:///etc/passwd", "one.safetensors/../../secret.safetensors", "//secret.safetensors", "\n.safetensors"]


class IndexMaker:
    """Index files that lead to shards, somewhere else, or nowhere."""

    def __init__(self, chance: random.Random, parent: Path) -> None:
        self._chance = chance
        self._tricks = [*_TRICKS, str(parent / "secret.safetensors")]

    def make(self) -> bytes:
        """One index."""
        chance = self._chance
        tokens: list[str] = []
        weight_map: dict[str, Any] = {
            name: chance.choice(_SHARDS) for name in chance.sample("abc", chance.randint(0, 3))
        }
        for _ in range(chance.choice([0, 1, 1, 2])):
            weight_map[chance.choice(["a", "b", "missing", "\ud800"])] = self._odd(tokens)
        document: object = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        if chance.random() < 0.2:
            document = chance.choice(
                [weight_map, {"weight_map": self._odd(tokens)}, [weight_map], {"weight_map": [weight_map]}]
            )
        text = json.dumps(document)
        for number, token in enumerate(tokens):
            text = text.replace(f'"@{number}@"', token)
        raw = text.encode(errors="surrogatepass")
        if chance.random() < 0.15:
            place = chance.randint(0, len(raw))
            raw = chance.choice(
                [raw[:place], raw[:place] + chance.randbytes(2) + raw[place:], b"\xff" + raw, raw + b"{}"]
            )
        return raw

    def _odd(self, tokens: list[str]) -> object:
        if self._chance.random() < 0.2:
            tokens.append(self._chance.choice(_TOKENS))
            return f"@{len(tokens) - 1}@"
        return self._chance.choice([*self._tricks, *self._tricks, *_ODD])


# ---------------------------------------------------------------- files of torch.save


def archive_of(program: bytes, **records: bytes) -> bytes:
    """A file of torch.save with `program` for its pickle, and four floats for its storage 0."""
    content = {"data.pkl": program, "byteorder": b"little", "data/0": bytes(16), "version": b"3\n", **records}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in content.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


def text(value: str) -> bytes:
    """The instruction that pushes a string."""
    raw = value.encode(errors="surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def calling(name: str, *arguments: bytes) -> bytes:
    """The instructions that call a global, "module name", with `arguments`."""
    module, _, function = name.rpartition(" ")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


PROTOCOL, STOP, NOTHING = b"\x80\x02", b".", b"N"
NO_HOOKS = b"ccollections\nOrderedDict\n)R"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
TENSOR = calling("torch._utils _rebuild_tensor_v2", STORAGE, b"K\x00", b"K\x04\x85", b"K\x01\x85", b"\x89", NO_HOOKS)
STATE_DICT = PROTOCOL + b"}" + text("w") + TENSOR + b"s" + STOP


class PickleMaker:
    """Pickles that are damaged, and programs of random instructions, some of which would make `canary`."""

    def __init__(self, chance: random.Random, canary: Path) -> None:
        self._chance = chance
        evil = [f"c{name}\n".encode() for name in ("os\nmkdir", "posix\nmkdir", "builtins\neval", "__builtin__\nexec")]
        tame = [
            f"c{name}\n".encode()
            for name in ("collections\nOrderedDict", "torch\nSize", "_codecs\nencode", "builtins\nset")
        ]
        tame += [
            f"c{name}\n".encode()
            for name in ("torch._utils\n_rebuild_parameter", "torch._tensor\n_rebuild_from_type_v2")
        ]
        tame += [
            f"c{name}\n".encode() for name in ("torch\nTensor", "torch.nn.parameter\nParameter", "torch\nFloatStorage")
        ]
        values = [
            text("w"),
            text("latin1"),
            text(str(canary)),
            b"N",
            b"K\x01",
            b"J\xff\xff\xff\x7f",
            b"]",
            b"}",
            b")",
            b"\x89",
        ]
        shape = [
            b"(",
            b"t",
            b"\x85",
            b"\x86",
            b"\x87",
            b"R",
            b"\x81",
            b"b",
            b"a",
            b"e",
            b"s",
            b"u",
            b"Q",
            b"o",
            b"2",
            b"0",
        ]
        memo = [
            b"q\x00",
            b"h\x00",
            b"q\x01",
            b"h\x01",
            b"r\xff\xff\xff\xff",
            b"\x94",
            b"\x93",
            b"i" + b"os\nmkdir\n",
            b"P0\n",
        ]
        self._instructions = [*evil, *tame, *values, *values, *shape, *shape, *memo, TENSOR, STORAGE, NO_HOOKS]

    def make(self) -> bytes:
        """One file."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.4:
            length = chance.randint(1, 12)
            program = b"".join(chance.choices(self._instructions, k=length))
            return archive_of(PROTOCOL + b"}" + text("w") + program + chance.choice([b"s.", b"."]))
        content = bytearray(archive_of(STATE_DICT) if kind < 0.7 else _of_torch())
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(content))
            content[place : place + chance.choice([0, 1, 1, 4])] = chance.randbytes(chance.choice([0, 1, 1, 4]))
        return bytes(content)


def _of_torch() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.arange(4.0), "v": torch.nn.Parameter(torch.ones(2, 3))}, file, pickle_protocol=2)
    return file.getvalue()


class MakesAFolder:
    """An object whose unpickling runs code: it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)
