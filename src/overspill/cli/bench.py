"""`overspill bench`: what this machine's link and disk give, and how near to that the library comes."""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.text import Text
from torch import nn

import overspill
from overspill.checkpoint.writer import SafetensorsWriter, lay_out
from overspill.cli.errors import require
from overspill.cli.lines import cached_rate, direct_rate, drop_from_cache
from overspill.cli.options import Debug, Device, Json, parse_bytes
from overspill.cli.output import Output, table
from overspill.config import SMALL_TENSOR, format_size
from overspill.devices import buffer_of, compute_device, link_rate
from overspill.managed import managed
from overspill.tensors import TensorSpec

_WIDTHS = (1024, 512, 256)
_LEAST_BLOCKS = 16
_PASSES = 5
_WINDOW_BLOCKS = 4


class Peer(StrEnum):
    """Whom to measure beside."""

    ACCELERATE = "accelerate"


@dataclass(frozen=True)
class Figure:
    """One piece of work: its seconds, those that the hardware allows, and a peer's."""

    work: str
    seconds: tuple[float, ...]
    line: float
    line_is: str
    peer_seconds: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def of_line(self) -> float:
        return self.line / self.median

    @property
    def peer(self) -> float | None:
        return statistics.median(self.peer_seconds) if self.peer_seconds else None


@dataclass(frozen=True)
class Rates:
    """The lines, in bytes a second. None: there is no such way here."""

    link: float | None
    direct: float | None
    cached: float


def bench(
    context: typer.Context,
    size: Annotated[
        int, typer.Option("--size", parser=parse_bytes, metavar="SIZE", help="Bytes of weights, random.")
    ] = "512MiB",  # type: ignore[assignment]  # as people write it
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the checkpoint is written for a while: on the disk to be measured.", show_default=False
        ),
    ] = None,
    peer: Annotated[Peer | None, typer.Option(help="Measure this library too.", show_default=False)] = None,
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine's link and disk, and how near to them the library comes. Takes seconds.

    A stack of linear blocks with random weights is written, and one vector is sent through it. The line of each figure
    is the time that the hardware alone would take for it, measured in the same run.
    """
    output: Output = context.obj
    if peer is not None:
        require(peer.value, f"--peer {peer.value}")
    place = compute_device(device)
    with tempfile.TemporaryDirectory(prefix="overspill-bench-", dir=folder) as scratch:
        work = _Work(Path(scratch), size, place, peer)
        rates = work.rates()
        figures = list(work.figures(rates))
    output.result(
        {"device": str(place), "bytes": work.nbytes, **_document(rates, figures, peer)},
        f"{format_size(work.nbytes)} of weights, {str(work.dtype).removeprefix('torch.')}, in {work.blocks} blocks; "
        f"computed on {place}, stored in {Path(folder or tempfile.gettempdir()).absolute()}\n",
        *_shown(rates, figures, peer),
    )


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def _block_bytes(width: int, dtype: torch.dtype) -> int:
    return 8 * width * width * dtype.itemsize


def _width(size: int, dtype: torch.dtype) -> int:
    """The widest blocks of which `size` bytes hold enough."""
    # What is small stays on the device, and would not be streamed.
    possible = [width for width in _WIDTHS if _block_bytes(width, dtype) >= 2 * SMALL_TENSOR]
    for width in possible:
        if size >= _LEAST_BLOCKS * _block_bytes(width, dtype):
            return width
    least = _LEAST_BLOCKS * _block_bytes(possible[-1], dtype)
    raise typer.BadParameter(f"--size {format_size(size)} is too little to measure. Write {format_size(least)} or more")


class _Work:
    """The model, its checkpoint, and what is done with them."""

    def __init__(self, scratch: Path, size: int, device: torch.device, peer: Peer | None) -> None:
        self._scratch, self._device, self._peer = scratch, device, peer
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._width = _width(size, self.dtype)
        self._block_bytes = _block_bytes(self._width, self.dtype)
        self.blocks = size // self._block_bytes
        self.nbytes = self.blocks * self._block_bytes
        self._file = scratch / "model.safetensors"
        self._input = torch.randn(1, self._width, dtype=self.dtype)
        self._write()

    def _write(self) -> None:
        """The same random numbers for each block: nobody looks at them, and they are quickly written."""
        block = _Block(self._width).to(self.dtype)
        one = {name: torch.randn_like(value) * 0.01 for name, value in block.state_dict().items()}
        names = [(f"{block}.{name}", value) for block in range(self.blocks) for name, value in one.items()]
        layout = lay_out((name, TensorSpec.of(value)) for name, value in names)
        with SafetensorsWriter(self._file, layout) as writer:
            for name, value in names:
                writer.write(name, [buffer_of(value)])

    def rates(self) -> Rates:
        drop_from_cache(self._file)
        direct = direct_rate(self._file)
        return Rates(link=link_rate(self._device), direct=direct, cached=cached_rate(self._file))

    def figures(self, rates: Rates) -> Iterator[Figure]:
        resident = self._resident()
        compute = statistics.median(self._passes(resident))
        del resident
        yield from self._from_disk(rates, compute)
        if rates.link is not None:
            yield self._from_host(rates.link, compute)

    def _from_disk(self, rates: Rates, compute: float) -> Iterator[Figure]:
        model = self._skeleton()
        plan = overspill.plan(model, {}, device=self._device, window=_WINDOW_BLOCKS * self._block_bytes)
        overspill.load(model, self._file, plan, progress=False)
        with self._peers() as peer:
            if rates.direct is not None:
                line, line_is = _slower(plan.streamed_bytes / rates.direct, "direct reads", compute)
                yield Figure(
                    "a pass, all weights on disk, cold",
                    self._passes(model, before=lambda: self._make_cold(model)),
                    line,
                    line_is,
                    self._passes(peer, before=self._drop_peers_files) if peer else (),
                )
            cached_rate(self._file)
            # The CPU computes with the cache's own pages. Any other device gets a copy.
            copying = 0 if self._device.type == "cpu" else plan.streamed_bytes / rates.cached
            line, line_is = _slower(copying, "page cache", compute)
            work = "a pass, all weights on disk, in the page cache"
            yield Figure(work, self._passes(model), line, line_is, self._passes(peer) if peer else ())

    def _from_host(self, link: float, compute: float) -> Figure:
        model = self._skeleton()
        budget: dict[int | str, int | str] = {"cpu": 2 * self.nbytes}
        plan = overspill.plan(model, budget, device=self._device, window=_WINDOW_BLOCKS * self._block_bytes)
        overspill.load(model, self._file, plan, progress=False)
        line, line_is = _slower(plan.streamed_bytes / link, "link", compute)
        peer: tuple[float, ...] = ()
        if self._peer is not None:
            from accelerate import cpu_offload

            peer = self._passes(cpu_offload(self._resident(), execution_device=self._device))
        return Figure("a pass, all weights in CPU memory", self._passes(model), line, line_is, peer)

    @contextmanager
    def _peers(self) -> Iterator[nn.Module | None]:
        """The model as the peer runs it from disk."""
        if self._peer is None:
            yield None
            return
        from accelerate import disk_offload

        model = self._resident().cpu()
        yield disk_offload(model, str(self._scratch / "peer"), execution_device=self._device)

    def _make_cold(self, model: nn.Module) -> None:
        manager = managed(model)
        assert manager is not None
        for residency in manager.residencies:
            residency.clear()  # pages that are in use stay in the cache
        drop_from_cache(self._file)

    def _drop_peers_files(self) -> None:
        for file in (self._scratch / "peer").iterdir():
            drop_from_cache(file)

    def _skeleton(self) -> nn.Module:
        with overspill.empty_weights():
            return nn.Sequential(*(_Block(self._width) for _ in range(self.blocks))).to(self.dtype).eval()

    def _resident(self) -> nn.Module:
        """An ordinary model: what it takes to compute, and no more."""
        model = self._skeleton()
        plan = overspill.plan(model, {str(self._device): 2 * self.nbytes}, device=self._device)
        return overspill.restore(overspill.load(model, self._file, plan, progress=False))

    def _passes(self, model: nn.Module, before: Callable[[], None] = lambda: None) -> tuple[float, ...]:
        """Seconds of some passes, after one that does not count."""
        seconds = []
        for _ in range(_PASSES + 1):
            before()
            start = perf_counter()
            with torch.no_grad():
                model(self._input.to(self._device))
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            seconds.append(perf_counter() - start)
        return tuple(seconds[1:])


def _slower(moving: float, way: str, compute: float) -> tuple[float, str]:
    """Bytes move while others are computed with, so the slower of the two is the line."""
    return (moving, way) if moving >= compute else (compute, "compute")


def _shown(rates: Rates, figures: list[Figure], peer: Peer | None) -> Iterator[str | Text]:
    named = [
        ("link, pinned memory to device", rates.link),
        ("disk, direct reads", rates.direct),
        ("disk, through the page cache", rates.cached),
    ]
    rows = [(name, f"{rate / 1e9:.2f} GB/s") for name, rate in named if rate is not None]
    yield table(["line", "rate"], rows, right=["rate"])
    yield ""
    heads = ["work", "seconds", "(min–max)", "line", "set by", "of line", *([f"{peer}"] if peer else [])]
    yield table(
        heads,
        [
            (
                figure.work,
                f"{figure.median:.3f}",
                f"({min(figure.seconds):.3f}–{max(figure.seconds):.3f})",
                f"{figure.line:.3f}",
                figure.line_is,
                f"{figure.of_line:.0%}",
                *([f"{figure.peer:.3f}" if figure.peer is not None else "–"] if peer else []),
            )
            for figure in figures
        ],
        right=["seconds", "line", "of line", *([f"{peer}"] if peer else [])],
    )


def _document(rates: Rates, figures: list[Figure], peer: Peer | None) -> dict[str, Any]:
    return {
        "bytes_per_second": {"link": rates.link, "disk_direct": rates.direct, "page_cache": rates.cached},
        "figures": [
            {
                "work": figure.work,
                "seconds": list(figure.seconds),
                "median_seconds": figure.median,
                "line_seconds": figure.line,
                "line_is": figure.line_is,
                "of_line": figure.of_line,
                **({f"{peer}_seconds": list(figure.peer_seconds)} if peer else {}),
            }
            for figure in figures
        ],
    }
