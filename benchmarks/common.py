"""What the benchmarks share: the model's shape, its random checkpoint, repeated timings and the table of results."""

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local; nobody should wait for a network

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import overspill

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

GB: Final = 1e9


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama of a certain size. Its weights are random, and its head is not tied."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    dtype: torch.dtype

    def cut(self, layers: int | None) -> "Shape":
        """The same with fewer layers."""
        return self if layers is None else replace(self, layers=layers)

    def config(self) -> Any:
        """As Transformers wants it."""
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
            dtype=self.dtype,
        )

    def skeleton(self) -> nn.Module:
        """The model without weights, in its dtype; what a checkpoint does not hold is real."""
        with overspill.empty_weights():
            model: nn.Module = LlamaForCausalLM._from_config(self.config(), dtype=self.dtype)
        assert all(parameter.is_meta and parameter.dtype == self.dtype for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())
        return model.eval()

    def random_state(self, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
        """Weights as an initialised model has them: small numbers, and norms near one."""
        random = torch.Generator(device).manual_seed(seed)
        state = {}
        for name, parameter in self.skeleton().named_parameters():
            values = torch.randn(parameter.shape, dtype=self.dtype, device=device, generator=random)
            state[name] = values.mul_(0.02) if parameter.ndim > 1 else values.mul_(0.1).add_(1)
        return state


LLAMA_8B: Final = Shape(
    hidden=4096, layers=32, intermediate=14336, heads=32, kv_heads=8, vocab=128256, dtype=torch.bfloat16
)
LLAMA_2GB: Final = Shape(
    hidden=1536, layers=18, intermediate=4096, heads=12, kv_heads=6, vocab=16000, dtype=torch.float32
)


def nbytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all `tensors`."""
    return sum(tensor.nbytes for tensor in tensors.values())


def write_checkpoint(shape: Shape, state: Mapping[str, torch.Tensor], folder: Path, shards: int) -> list[Path]:
    """`state` as a sharded safetensors checkpoint, as `save_pretrained` lays it out. Returns the shards."""
    limit = nbytes_of(state) / shards
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in state.items():
        if len(parts) < shards and nbytes_of(parts[-1]) + tensor.nbytes / 2 > limit:
            parts.append({})
        parts[-1][name] = tensor
    files = [folder / f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]

    def write(part: dict[str, torch.Tensor], file: Path) -> None:
        save_file(part, file, metadata={"format": "pt"})

    with ThreadPoolExecutor(shards) as pool:
        list(pool.map(write, parts, files))
    weight_map = {name: file.name for part, file in zip(parts, files, strict=True) for name in part}
    index = {"metadata": {"total_size": nbytes_of(state)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shape.config().save_pretrained(folder)
    os.sync()  # dirty pages cannot be dropped, and their writing must not disturb what is measured later
    return files


def forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the last token, without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return logits


# Timings.


@dataclass(frozen=True)
class Timing:
    """Seconds of several repetitions."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def __str__(self) -> str:
        digits = 3 if self.median >= 0.01 else 5
        return f"{self.median:.{digits}f} ({min(self.samples):.{digits}f}–{max(self.samples):.{digits}f})"


def synchronize() -> None:
    """Wait for all streams of the device, the copy streams among them: what a pass has started belongs to its time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_once(run: Callable[[], object]) -> float:
    """Seconds of one call, with the device's work."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def repeat(run: Callable[[], object], times: int, *, warm_up: int = 1) -> Timing:
    """Time `run` again and again."""
    gc.collect()
    for _ in range(warm_up):
        time_once(run)
    return Timing(tuple(time_once(run) for _ in range(times)))


def alternate(first: Callable[[], object], second: Callable[[], object], times: int) -> tuple[Timing, Timing]:
    """Time two calls in turns (ab ba ab …), so that a clock that drifts drifts for both."""
    gc.collect()
    for run in (first, second):
        time_once(run)
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(times):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            samples[which].append(time_once((first, second)[which]))
    return Timing(tuple(samples[0])), Timing(tuple(samples[1]))


# Results.


@dataclass(frozen=True)
class Check:
    """A promise, what was measured, and whether it was kept."""

    promise: str
    measured: str
    met: bool

    @classmethod
    def at_least(cls, promise: str, value: float, bound: float, unit: str = "×") -> "Check":
        """`value` must reach `bound`."""
        return cls(promise, _number(value, unit), value >= bound)

    @classmethod
    def at_most(cls, promise: str, value: float, bound: float, unit: str = "×") -> "Check":
        """`value` must not exceed `bound`."""
        return cls(promise, _number(value, unit), value <= bound)


def _number(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "%" else f"{value:.3g} {unit}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    what: str
    ours: Timing
    line: float | None = None
    """Seconds that the hardware allows; None where nothing but code takes time."""
    line_is: str = ""
    peer: Timing | None = None
    peer_is: str = ""
    others: Mapping[str, Timing | str] = field(default_factory=dict)
    """Further peers, or why they were not measured."""
    targets: Sequence[Check] = ()
    """What this row promises."""
    checks: Sequence[Check] = ()
    """What every row promises."""
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def all_checks(self) -> list[Check]:
        return [*self.targets, *self.checks]

    @property
    def of_line(self) -> float | None:
        return None if self.line is None else self.line / self.ours.median

    @property
    def speed_up(self) -> float | None:
        return None if self.peer is None else self.peer.median / self.ours.median

    def as_json(self) -> dict[str, object]:
        """For the file of results."""
        timings = {"ours": self.ours, "peer": self.peer}
        medians = {f"{who}_seconds": None if timing is None else timing.median for who, timing in timings.items()}
        return {**asdict(self), **medians, "of_line": self.of_line, "speed_up": self.speed_up}

    def peers(self) -> Iterator[tuple[str, Timing | str]]:
        """All of them, the one that targets speak of first."""
        if self.peer is not None:
            yield self.peer_is, self.peer
        yield from self.others.items()


def report(row: Row) -> str:
    """All that is known of one row."""
    lines = [f"{row.name}: {row.what}"]
    beside = "" if row.line is None else f", line {row.line:.3g} s ({row.line_is}): {row.of_line:.1%} of the line"
    lines.append(f"    ours {row.ours} s{beside}")
    for who, peer in row.peers():
        slower = "" if isinstance(peer, str) else f" s: {peer.median / row.ours.median:.2f}× slower"
        lines.append(f"    {who} {peer}{slower}")
    for name, value in row.details.items():
        lines.append(f"    {name}: {value:.4g}" if isinstance(value, float) else f"    {name}: {value}")
    lines += [f"    {'yes' if check.met else 'NO '}  {check.promise}: {check.measured}" for check in row.all_checks]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """The rows in columns, in the syntax of Markdown."""
    cells = [["work", "ours, s (min–max)", "line, s", "of line", "peer, s (min–max)", "speed-up", "targets", "met"]]
    for row in rows:
        peers = "; ".join(f"{who} {peer}" for who, peer in row.peers()) or "–"
        speed_up = "–" if row.speed_up is None else f"{row.speed_up:.2f}×"
        line = ["–", "–"] if row.line is None else [f"{row.line:.3g}", f"{row.of_line:.1%}"]
        targets = "; ".join(f"{check.promise}: {check.measured}" for check in row.targets)
        missed = [check.promise for check in row.all_checks if not check.met]
        met = "all" if not missed else f"NOT {', '.join(missed)}"
        cells.append([row.what, str(row.ours), *line, peers, speed_up, targets, met])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def environment() -> dict[str, object]:
    """Where and with what the figures were made."""
    packages = ("torch", "transformers", "accelerate", "safetensors")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "overspill": overspill.__version__,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        root = Path(__file__).parent
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
