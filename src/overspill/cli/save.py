"""`overspill save`: a checkpoint of any size in other shards or another dtype, without a model."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer

from overspill.cli.options import Debug, Json, parse_bytes, parse_dtype
from overspill.cli.output import Output
from overspill.config import format_size
from overspill.resharding import Resharded, reshard

_NAMED = 5  # tensors that a note names before it only counts them


def save(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(help="A checkpoint: a folder, an index.json, or a file of weights.")],
    destination: Annotated[Path, typer.Argument(help="A folder: new, empty, or with a checkpoint to replace.")],
    max_shard_size: Annotated[
        int, typer.Option("--max-shard-size", parser=parse_bytes, metavar="SIZE", help="Bytes of tensors in one file.")
    ] = "5GB",  # type: ignore[assignment]  # as people write it, for the help; it is parsed, too
    dtype: Annotated[
        torch.dtype | None,
        typer.Option(parser=parse_dtype, help="Cast floating-point tensors to this.", show_default=False),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint anew: other shards, another dtype, pickles as safetensors. In a few megabytes of memory.

    From a folder, its config, tokenizer and other files go along, and config.json names the new dtype. Destination may
    be the source: the old checkpoint stands until the new one does.
    """
    output: Output = context.obj
    with _stopping_in_time(output) as go_on:
        written = reshard(source, destination, max_shard_size=max_shard_size, dtype=dtype, go_on=go_on)
    if written.overflowed:
        more = f" and {len(written.overflowed) - _NAMED} more" if len(written.overflowed) > _NAMED else ""
        output.note(
            f"overspill: warning: {', '.join(written.overflowed[:_NAMED])}{more} held values too large for "
            f"{str(dtype).removeprefix('torch.')}, which are infinite now. bfloat16 would have room for them"
        )
    if written.left_out:
        output.note(f"overspill: not copied, as weights of another kind: {', '.join(written.left_out)}")
    output.result(_document(written), _sentence(written))


@contextmanager
def _stopping_in_time(output: Output) -> Iterator[Callable[[], None]]:
    """Within, Ctrl-C takes effect where the returned function is called: while nothing is in place yet.

    A second Ctrl-C takes effect at once. The old checkpoint or the new one is whole then too, but files beside the
    weights may be the old ones.
    """
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output.note("overspill: stopping; what was written is removed")

    def go_on() -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield go_on
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield go_on
    finally:
        signal.signal(signal.SIGINT, before)


def _sentence(written: Resharded) -> str:
    files = f"{written.files} file{'s' if written.files != 1 else ''}"
    cast = f", {written.cast:,} of them cast" if written.cast else ""
    beside = f", and {len(written.copied)} other files" if written.copied else ""
    return f"{written.folder}: {written.tensors:,} tensors{cast}, {format_size(written.nbytes)} in {files}{beside}"


def _document(written: Resharded) -> dict[str, Any]:
    return {
        "folder": str(written.folder),
        "files": written.files,
        "tensors": written.tensors,
        "bytes": written.nbytes,
        "cast": written.cast,
        "overflowed": list(written.overflowed),
        "copied": list(written.copied),
        "left_out": list(written.left_out),
    }
