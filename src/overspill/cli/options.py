"""Options that several commands share, and how what people write is read."""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer

from overspill.cli.output import Output
from overspill.config import parse_size
from overspill.errors import BudgetError

Budget = Mapping[int | str, int | str]

_EXAMPLE = "0=10GiB,cpu=30GiB"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_DTYPES |= {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def parse_budget(text: str) -> Budget:
    """`0=10GiB,cpu=30GiB` as `overspill.plan` takes it; `disk`: nothing in memory, everything on disk."""
    if text.strip() == "disk":
        return {}
    budget: dict[int | str, int | str] = {}
    for part in text.split(","):
        device, equals, size = (piece.strip() for piece in part.partition("="))
        if not (device and equals and size):
            raise typer.BadParameter(f"{part!r} in {text!r} is not DEVICE=SIZE. Write, for example, {_EXAMPLE}")
        key = int(device) if device.isdecimal() else device
        if key in budget:
            raise typer.BadParameter(f"{text!r} names {device} twice. Write, for example, {_EXAMPLE}")
        try:
            budget[key] = parse_size(size)
        except BudgetError:
            raise typer.BadParameter(f"{size!r} in {text!r} is not a size. Write, for example, {_EXAMPLE}") from None
    return budget


def parse_dtype(name: str) -> torch.dtype:
    """A dtype that weights may be cast to, by torch's name for it or the usual short one."""
    found = _DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(_DTYPES)}. Write, for example, bfloat16")
    return found


def parse_device(text: str) -> int | str:
    """A device's number, or its name."""
    return int(text) if text.isdecimal() else text


def parse_bytes(text: str) -> int:
    """A size of at least a byte."""
    try:
        size = parse_size(text)
    except BudgetError:
        size = 0
    if size == 0:
        raise typer.BadParameter(f"{text!r} is not a size. Write, for example, 5GB or 500MiB")
    return size


def _set_json(context: typer.Context, value: bool) -> bool:
    output: Output = context.obj
    output.as_json = value
    return value


def _set_debug(context: typer.Context, value: bool) -> bool:
    output: Output = context.obj
    output.debug = value
    return value


MaxMemory = Annotated[
    Budget | None,
    typer.Option(  # named, here and wherever there is a metavar: typer 0.27 takes that for the name otherwise
        "--max-memory",
        parser=parse_budget,
        metavar="BUDGET",
        help=f"Memory for weights: {_EXAMPLE}. What is not named gets none, and 'disk' alone means that everything is "
        "read from there. Left out: what is free now.",
        show_default=False,
    ),
]
Device = Annotated[
    Any | None,  # int | str, which typer would not take, parser or not
    typer.Option(
        "--device",
        parser=parse_device,
        metavar="DEVICE",
        help="Where to compute: 0, cuda:1, cpu. Left out: the first GPU, or the CPU.",
        show_default=False,
    ),
]
# Eager: what goes wrong with the other options is told in the form that these ask for.
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, on stdout.", is_eager=True, callback=_set_json)
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", is_eager=True, callback=_set_debug)
]
