"""A timeline of what is done for a model, in the form that Perfetto and Chrome's tracing page read."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from overspill.errors import StateError
from overspill.managed import Managed, managers_of
from overspill.recording import COMPUTE, WAIT, Recording, Span

_SHORTEST_WAIT = 1e-6
"""Seconds. Each call of a unit waits for its bytes; most are there, and the wait is over before it began."""


@contextmanager
def trace_model(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record all that is read, copied, waited for and computed within, and write it to `path`."""
    managers = [manager for manager in managers_of(model) if manager.units]
    if not managers:
        raise StateError("nothing of this model is offloaded, so there is nothing to trace. Load it by a plan first")
    transfers = {transfer for manager in managers for transfer in manager.transfers.values()}
    if any(transfer.recording is not None for transfer in transfers):
        raise StateError("this model is being traced already. Wait until that has ended")
    recording = Recording([device for manager in managers for device in manager.plan.devices])
    for transfer in transfers:
        transfer.recording = recording
    try:
        yield
    finally:
        for transfer in transfers:
            transfer.recording = None
        spans = [span for span in recording.spans() if span.kind != WAIT or span.seconds > _SHORTEST_WAIT]
        for manager in managers_of(model):
            manager.traced = spans
        _write(Path(path), spans, managers)


def _write(path: Path, spans: Sequence[Span], managers: Sequence[Managed]) -> None:
    lanes = {lane: number for number, lane in enumerate(sorted({span.lane for span in spans}, key=_order), start=1)}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    order = [
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": number, "args": {"sort_index": number}}
        for number in lanes.values()
    ]
    title = ", ".join(type(manager.model).__name__ for manager in managers)
    process = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"overspill: {title}"}}
    events = [
        {
            "name": f"{span.kind} {span.what}".strip(),
            "cat": span.kind,
            "ph": "X",
            "pid": 1,
            "tid": lanes[span.lane],
            "ts": span.start * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"unit": span.what} | ({"bytes": span.nbytes} if span.nbytes else {}),
        }
        for span in spans
    ]
    document = {"displayTimeUnit": "ms", "traceEvents": [process, *names, *order, *events]}
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        aside.write_text(json.dumps(document))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _order(lane: str) -> tuple[int, str]:
    """Compute devices on top, then links, then reader threads."""
    return (2 if "reader" in lane else 1 if ": " in lane else 0), lane


def overlap(spans: Sequence[Span]) -> tuple[float, float, float]:
    """Seconds of computing, of moving bytes, and of both at once."""
    computing = _merged([span for span in spans if span.kind == COMPUTE])
    moving = _merged([span for span in spans if span.kind not in (COMPUTE, WAIT)])
    both = sum(max(0.0, min(end, other) - max(start, begin)) for start, end in computing for begin, other in moving)
    return _length(computing), _length(moving), both


def _merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        start, end = span.start, span.start + span.seconds
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
