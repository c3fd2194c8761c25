"""How long a training step takes and how much memory it needs, offloaded in each way, beside the peers.

    PYTHONPATH=src python3 benchmarks/training.py --out results.json --plot training.svg

Llama blocks in bf16, forward and backward; everything is measured in one run. A case's first method is the plain one,
and what the others compute is compared with it: our gradients must have its bits. Ends with status 1 when a promise was
not kept.
"""

import argparse
import gc
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; deterministic products need it

import torch
from common import GB, LLAMA_8B, Check, Shape, environment, synchronize, time_once
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import overspill
from overspill.devices import link_rate

DEVICE: Final = torch.device("cuda", 0)
LLAMA_3B: Final = Shape(
    hidden=3072, layers=28, intermediate=8192, heads=24, kv_heads=8, vocab=128256, dtype=torch.bfloat16
)
BLOCKS_8B: Final = LLAMA_8B.cut(8)


class Stack(nn.Module):
    """Decoder blocks alone: what is offloaded, and nothing beside it."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        config = shape.config()
        config._attn_implementation = "sdpa"
        config.use_cache = False
        config.max_position_embeddings = 1 << 17
        torch.set_default_dtype(shape.dtype)
        try:
            with device:
                self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(shape.layers))
                self.rotary = LlamaRotaryEmbedding(config)
        finally:
            torch.set_default_dtype(torch.float32)
        random = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.02, generator=random)
        self.checkpointed = False

    def compile_blocks(self) -> None:
        """Compile each block by itself."""
        torch._dynamo.config.recompile_limit = 64  # every way is compiled in this process, with other settings
        for layer in self.layers:
            layer.compile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        rotations = self.rotary(x, places)
        for layer in self.layers:
            call: Callable[..., Any] = partial(layer, position_embeddings=rotations, attention_mask=None)
            x = checkpoint(call, x, use_reentrant=False) if self.checkpointed else call(x)
        return x


@dataclass(frozen=True)
class Case:
    """A model, and the tokens of one step."""

    name: str
    shape: Shape
    sequences: int
    tokens: int

    def inputs(self) -> torch.Tensor:
        random = torch.Generator(DEVICE).manual_seed(1)
        shape = (self.sequences, self.tokens, self.shape.hidden)
        return torch.randn(shape, dtype=self.shape.dtype, device=DEVICE, generator=random)


@dataclass(frozen=True)
class Point:
    """One method's step."""

    case: str
    method: str
    seconds: float
    allocated: int
    reserved: int
    samples: tuple[float, ...]
    same_bits: bool | None
    """Whether the gradients are the plain method's; None where nobody compared them."""

    def __str__(self) -> str:
        bits = {True: "same bits", False: "OTHER BITS", None: ""}[self.same_bits]
        return (
            f"{self.case:14} {self.method:34} {self.seconds:7.3f} s  "
            f"{self.allocated / GB:6.2f} / {self.reserved / GB:6.2f} GB  {bits}"
        )


Step = Callable[[], None]
Method = Callable[[Case], "Iterator[tuple[nn.Module, Step]]"]


def forward_and_backward(model: nn.Module, x: torch.Tensor) -> None:
    """One step without an optimizer."""
    model(x).float().square().mean().backward()


@contextmanager
def plain(case: Case, *, checkpointed: bool = False, compiled: bool = False) -> Iterator[tuple[nn.Module, Step]]:
    """All on the device."""
    model = Stack(case.shape, DEVICE)
    model.checkpointed = checkpointed
    if compiled:
        model.compile_blocks()
    yield model, partial(forward_and_backward, model, case.inputs())


@contextmanager
def saved_on_cpu(case: Case) -> Iterator[tuple[nn.Module, Step]]:
    """torch's own context manager, with pinned memory."""
    with plain(case) as (model, step):

        def offloaded() -> None:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                step()

        yield model, offloaded


def _torchtunes() -> Any:
    """torchtune's class: from an installed torchtune, or from its wheel, unpacked to .peers, where torchao is missing.

    Of what else its file imports it only asks whether tensors are of that kind, and none of ours is.
    """
    try:
        from torchtune.training import OffloadActivations  # type: ignore[import-not-found]
    except ImportError:
        file = Path(__file__).parents[1] / ".peers" / "torchtune" / "training" / "_activation_offloading.py"
        stands_for = {"torchao": {}, "torchao.dtypes": {}, "torchao.dtypes.nf4tensor": {"NF4Tensor": _Never}}
        stands_for |= {"torchtune": {}, "torchtune.modules": {"TiedLinear": _Never}}
        stands_for |= {"torchtune.utils": {"get_logger": logging.getLogger}}
        for name, content in stands_for.items():
            module = sys.modules.setdefault(name, ModuleType(name))
            vars(module).update(content)
        spec = spec_from_file_location("torchtune_offloading", file)
        assert spec is not None
        assert spec.loader is not None
        found = module_from_spec(spec)
        spec.loader.exec_module(found)
        return found.OffloadActivations
    return OffloadActivations


class _Never:
    """A class without instances."""


@contextmanager
def torchtune(case: Case) -> Iterator[tuple[nn.Module, Step]]:
    """torchtune's context manager, with streams."""
    offload_activations = _torchtunes()
    with plain(case) as (model, _):
        x = case.inputs()

        def step() -> None:
            with offload_activations(use_streams=True):
                loss = model(x).float().square().mean()
            loss.backward()

        yield model, step


@contextmanager
def fsdp2(
    case: Case, optimizer: Callable[[nn.Module], Any] | None = None, *, compiled: bool = False
) -> Iterator[tuple[nn.Module, Step]]:
    """FSDP2 in a world of one, with weights in pinned host memory, and checkpointing."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _join_world()
    model = Stack(case.shape, DEVICE)  # where random numbers are fast
    model.layers.to("cpu")
    model.checkpointed = True
    if compiled:
        model.compile_blocks()
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    yield model, _with_optimizer(model, partial(forward_and_backward, model, case.inputs()), optimizer)


def _join_world() -> None:
    if torch.distributed.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(DEVICE)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=DEVICE)


def _with_optimizer(model: nn.Module, step: Step, make: Callable[[nn.Module], Any] | None) -> Step:
    if make is None:
        return step
    optimizer = make(model)

    def whole() -> None:
        step()
        optimizer.step()
        optimizer.zero_grad()

    return whole


def fused_adamw(model: nn.Module) -> Any:
    """torch's fastest AdamW on the CPU."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


@contextmanager
def ours(
    case: Case, *, compiled: bool = False, all_blocks: bool = False, **options: Any
) -> Iterator[tuple[nn.Module, Step]]:
    """offload_training; of all blocks, or of all but the last, as is usual."""
    with plain(case, compiled=compiled) as (model, step):
        if all_blocks:
            options["layers"] = [f"layers.{index}" for index in range(case.shape.layers)]
        overspill.offload_training(model, **options)
        try:
            yield model, step
        finally:
            overspill.restore(model, device="cpu" if options.get("weights") else None)


@contextmanager
def ours_with_host_adamw(case: Case, **options: Any) -> Iterator[tuple[nn.Module, Step]]:
    """offload_training, and the update of a block while backward goes on with the blocks before it."""
    from overspill.training.host_adamw import HostAdamW

    with ours(case, **options) as (model, step):
        optimizer = HostAdamW(model.parameters(), lr=1e-5)

        def whole() -> None:
            with optimizer.overlap(undo=False):
                step()
            optimizer.step()
            optimizer.zero_grad()

        yield model, whole


@dataclass(frozen=True)
class Way:
    """One method of a case."""

    name: str
    make: Callable[[Case], Any]
    times: int = 7
    compared: bool = True
    """Whether its gradients are compared with the plain method's."""
    warm_up: int = 3
    """Steps: to make all memory, to be measured by memory=, and to learn the order that it chooses."""


def digest(model: nn.Module) -> list[torch.Tensor]:
    """The gradients, in as few bytes as tell them apart: sums of their bits, weighted by place."""
    result = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        bits = gradient.to(DEVICE).contiguous().view(torch.int16).flatten().long()
        result.append(torch.stack([bits.sum(), (bits * torch.arange(1, bits.numel() + 1, device=DEVICE)).sum()]).cpu())
    return result


def gradients(model: nn.Module, step: Step) -> list[torch.Tensor]:
    """What a step computes where kernels must give the same twice: attention's fastest backward does not."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as torch documents it
    torch.use_deterministic_algorithms(True)
    try:
        model.zero_grad()
        step()
        return digest(model)
    finally:
        torch.use_deterministic_algorithms(False)


def measure(case: Case, way: Way, expected: list[torch.Tensor] | None) -> tuple[Point, list[torch.Tensor] | None]:
    """Time a way, and compare what it computes."""
    free()
    torch.cuda.reset_peak_memory_stats()
    with way.make(case) as (model, step):
        marks = []
        for turn in range(way.times + way.warm_up):
            model.zero_grad()
            if turn == way.warm_up:
                free()
                torch.cuda.reset_peak_memory_stats()
            marks.append(time_once(step))
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found = gradients(model, step) if way.compared else None
    same = None
    if found is not None and expected is not None:
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    samples = tuple(sorted(marks[way.warm_up :]))
    point = Point(case.name, way.name, samples[len(samples) // 2], allocated, reserved, samples, same)
    return point, found


def in_turns(case: Case, ways: Sequence[Way], times: int) -> dict[str, tuple[float, ...]]:
    """The times of several ways that take turns: some machines' processors are twice as fast in one second as in the
    next, and short steps wait for them.
    """
    free()
    marks: dict[str, list[float]] = {way.name: [] for way in ways}
    with ExitStack() as stack:
        made = []
        for way in sorted(ways, key=lambda way: not way.name.startswith(_WITHIN)):  # memory= is measured alone
            model, step = stack.enter_context(way.make(case))
            made.append((way.name, model, step))
            for _ in range(way.warm_up):
                model.zero_grad()
                step()
            model.zero_grad()
        for _ in range(times):
            for name, model, step in made:
                marks[name].append(time_once(step))
                model.zero_grad()
    return {name: tuple(sorted(mine)) for name, mine in marks.items()}


def free() -> None:
    """Give back what the last model held."""
    synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    getattr(
        torch._C, "_host_emptyCache", lambda: None
    )()  # pinned memory that peers' way of offloading has left with torch


PEERS: Final = {
    "plain": Way("plain", plain),
    "checkpointing": Way("checkpointing", partial(plain, checkpointed=True)),
    "save_on_cpu": Way("torch save_on_cpu", saved_on_cpu, times=3),
    "torchtune": Way("torchtune OffloadActivations", torchtune, times=3),
    "fsdp2": Way("FSDP2 CPUOffloadPolicy", fsdp2, times=5, compared=False),
}
ACTIVATIONS: Final = Way("ours: activations", partial(ours), times=5)
RECOMPUTE: Final = Way("ours: recompute + inputs", partial(ours, recompute=True))
ALL_RECOMPUTE: Final = Way("ours: recompute + activations, weights", partial(ours, recompute=True, weights=True))
WEIGHTS: Final = Way("ours: weights, recompute", partial(ours, activations=False, weights=True, recompute=True))
WEIGHTS_ALONE: Final = Way("ours: weights", partial(ours, activations=False, weights=True))
_LEAST: Final = {"all_blocks": True, "recompute": True, "weights": True, "double_buffering": False}
LEAST: Final = Way("ours: the same, all blocks, one buffer", partial(ours, **_LEAST))
COMPILED: Final = Way(
    "ours: weights, recompute, compiled",
    partial(ours, activations=False, weights=True, recompute=True, compiled=True),
    warm_up=6,
)
LEAST_COMPILED: Final = Way("ours: all blocks, one buffer, compiled", partial(ours, **_LEAST, compiled=True), warm_up=6)
PEERS_COMPILED: Final = [
    Way("checkpointing, compiled", partial(plain, checkpointed=True, compiled=True), warm_up=6),
    Way("FSDP2 CPUOffloadPolicy, compiled", partial(fsdp2, compiled=True), times=5, compared=False, warm_up=6),
]


SHORT: Final = {"3B-2048": ("checkpointing", WEIGHTS.name), "3B-2048-compiled": (PEERS_COMPILED[0].name, COMPILED.name)}
"""Whose steps are so short that the host is what they wait for, with weights resident and with weights offloaded."""
_WITHIN: Final = "ours: memory="
TURNS: Final = {
    "3B-2048": [(*SHORT["3B-2048"], f"{_WITHIN}11.9GB"), ("FSDP2 CPUOffloadPolicy", f"{_WITHIN}1.24GB, weights")],
    "3B-2048-compiled": [SHORT["3B-2048-compiled"]],
    "8B-2x4096": [("plain", f"{_WITHIN}18GB")],
    "8B-4x8192": [("plain", f"{_WITHIN}62GB")],
}
"""Who is measured once more, in turns with whom, since a few per cent are much between them."""


def within(*budgets: str, warm_up: int = 3, **options: Any) -> list[Way]:
    """memory=, each block as it is fastest."""
    more = "".join(f", {name}" for name, value in options.items() if value)
    return [
        Way(f"{_WITHIN}{budget}{more}", partial(ours, memory=budget, **options), times=5, warm_up=warm_up)
        for budget in budgets
    ]


_STREAMED: Final = {"weights": True, "double_buffering": False}
"""… where weights stream as well, through as little memory as can be."""


def cases() -> dict[str, tuple[Case, list[Way]]]:
    """What is measured, by name."""
    acts = [PEERS["plain"], PEERS["checkpointing"], PEERS["torchtune"], PEERS["save_on_cpu"], ACTIVATIONS, RECOMPUTE]
    quick = [way for way in acts if way.name != "torch save_on_cpu"]
    result = {
        "8B-2x4096": (
            Case("8B-2x4096", BLOCKS_8B, 2, 4096),
            [*acts, *within("18GB", "11GB", "9.15GB", "8.75GB", "8.35GB")],
        ),
        "8B-4x8192": (Case("8B-4x8192", BLOCKS_8B, 4, 8192), [*quick, *within("62GB", "25GB", "16.1GB", "13.4GB")]),
    }
    for tokens, budget, small in ((2048, "11.9GB", "1.24GB"), (8192, "12.9GB", "3.3GB"), (16384, "14.4GB", "6GB")):
        case = Case(f"3B-{tokens}", LLAMA_3B, 1, tokens)
        mine = [WEIGHTS, ALL_RECOMPUTE, LEAST, *within(budget), *within(small, **_STREAMED)]
        if tokens == 2048:
            mine.append(WEIGHTS_ALONE)  # what is saved is little there, and a replay is what a slow host waits for
        result[case.name] = (case, [PEERS["checkpointing"], PEERS["fsdp2"], *mine])
    short = Case("3B-2048-compiled", LLAMA_3B, 1, 2048)
    mine = [COMPILED, LEAST_COMPILED, *within("11.9GB", warm_up=8, compiled=True)]
    mine += within("1.145GB", "1.115GB", warm_up=8, compiled=True, **_STREAMED)
    result[short.name] = (short, [PEERS_COMPILED[0], *mine, PEERS_COMPILED[1]])
    step = Case("3B-8192-step", LLAMA_3B, 1, 8192)
    whole = [
        Way("FSDP2 + fused AdamW", partial(fsdp2, optimizer=fused_adamw), times=3, compared=False),
        Way(
            "ours: weights, recompute, HostAdamW",
            partial(ours_with_host_adamw, activations=False, weights=True, recompute=True),
            times=3,
            compared=False,
        ),
        Way("ours: the same, inputs, all blocks, one buffer", partial(ours_with_host_adamw, **_LEAST), 3, False),
    ]
    result[step.name] = (step, whole)
    return result


def checks(points: Sequence[Point]) -> list[Check]:
    """What was promised of these points."""
    by = {(point.case, point.method): point for point in points}
    found: list[Check] = []

    def ratio(promise: str, case: str, mine: Way | str, theirs: Way | str, bound: float) -> None:
        name = [way if isinstance(way, str) else way.name for way in (mine, theirs)]
        first, second = by.get((case, name[0])), by.get((case, name[1]))
        if first is not None and second is not None:
            found.append(Check.at_most(f"{case}: {promise}", first.seconds / second.seconds, bound))

    ratio("weights ≤ 1.08 × resident", "3B-8192", WEIGHTS, PEERS["checkpointing"], 1.08)
    ratio("weights ≤ 1.03 × resident", "3B-16384", WEIGHTS, PEERS["checkpointing"], 1.03)
    ratio("activations ≤ 0.6 × torchtune", "8B-2x4096", ACTIVATIONS, PEERS["torchtune"], 0.6)
    ratio("recompute ≤ 1.03 × checkpointing", "8B-4x8192", RECOMPUTE, PEERS["checkpointing"], 1.03)
    ratio(
        "step ≤ 0.75 × FSDP2 + fused AdamW",
        "3B-8192-step",
        "ours: weights, recompute, HostAdamW",
        "FSDP2 + fused AdamW",
        0.75,
    )
    copies = copies_of(LLAMA_3B) / (link_rate(DEVICE) or 1)
    for case, (resident, mine) in SHORT.items():
        short, compute = by.get((case, mine)), by.get((case, resident))
        if short is not None and compute is not None:
            line = max(compute.seconds, copies)
            found.append(Check.at_most(f"{case}: weights ≤ 1.15 × max(compute, copies)", short.seconds / line, 1.15))
    frugal, theirs = by.get(("8B-4x8192", RECOMPUTE.name)), by.get(("8B-4x8192", "checkpointing"))
    if frugal is not None and theirs is not None:
        promise = "8B-4x8192: less memory than checkpointing"
        found.append(Check.at_most(promise, frugal.allocated / theirs.allocated, 1.0))
    peers = [point for point in points if not point.method.startswith("ours")]
    found += [_not_beaten(peer, points, "ours") for peer in peers]
    found += [_not_beaten(peer, points, _WITHIN) for peer in peers if _has(points, peer.case, _WITHIN)]
    found += [
        Check(f"{point.case}: {point.method} has the plain bits", "yes" if point.same_bits else "no", point.same_bits)
        for point in points
        if point.same_bits is not None and point.method.startswith("ours")
    ]
    return found


def _has(points: Sequence[Point], case: str, methods: str) -> bool:
    return any(point.case == case and point.method.startswith(methods) for point in points)


def _not_beaten(peer: Point, points: Sequence[Point], methods: str) -> Check:
    """Whether with no more memory than a peer takes, one of our points is as fast: of those whose name begins so."""
    fitting = [
        point.seconds
        for point in points
        if point.case == peer.case and point.method.startswith(methods) and point.allocated <= 1.005 * peer.allocated
    ]
    promise = f"{peer.case}: {methods.removeprefix('ours: ')} no slower than {peer.method} in its memory"
    if not fitting:
        return Check(promise, "nothing fits", False)
    return Check.at_most(promise, min(fitting) / peer.seconds, 1.01)


def _with_turns(case: Case, ways: Sequence[Way], points: Sequence[Point]) -> list[Point]:
    """The points, with the times of those that should take turns as they were then."""
    found: dict[str, tuple[float, ...]] = {}
    for names in TURNS.get(case.name, ()):
        chosen = [way for way in ways if way.name in names and _has(points, case.name, way.name)]
        if len(chosen) > 1:
            found |= in_turns(case, chosen, times=31 if case.name in SHORT else 11)
    result = []
    for point in points:
        samples = found.get(point.method) if point.case == case.name else None
        if samples is not None:
            point = replace(point, seconds=samples[len(samples) // 2], samples=samples)
            print(f"{point}  in turns", flush=True)
        result.append(point)
    return result


def copies_of(shape: Shape) -> int:
    """Bytes that a step with recompute brings to the device: each offloaded weight for forward and for backward."""
    head = shape.hidden // shape.heads
    attention = shape.hidden * (2 * shape.hidden + 2 * shape.kv_heads * head)
    block = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return 2 * (shape.layers - 1) * block * shape.dtype.itemsize


def plot(points: Sequence[Point], path: str) -> None:
    """Memory against time, one picture a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(point.case for point in points))
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(7.2 * columns, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        for number, point in enumerate(point for point in points if point.case == name):
            mine = point.method.startswith("ours")
            axis.scatter(
                point.seconds,
                point.allocated / GB,
                marker="o" if mine else "X",
                s=64,
                color=f"C{number}",
                label=point.method,
            )
        axis.set(title=name, xlabel="seconds a step", ylabel="peak allocated, GB")
        axis.margins(0.15)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))  # beside it: inside it hides points
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Run the chosen cases."""
    arguments = _arguments()
    facts = environment() | {"link, GB/s": (link_rate(DEVICE) or 0) / GB}
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    start, points, failed = time.perf_counter(), list[Point](), dict[str, str]()
    known = cases()
    for name in arguments.cases or known:
        case, ways = known[name]
        case = replace(case, shape=case.shape.cut(arguments.layers or case.shape.layers))
        expected = None
        for way in (way for way in ways if any(part in way.name for part in arguments.ways)):
            if time.perf_counter() - start > arguments.limit:
                failed[f"{name}, {way.name}"] = "not begun: --limit is over"
                continue
            try:
                point, found = measure(case, way, expected)
            except ImportError as missing:
                failed[f"{name}, {way.name}"] = f"not here: {missing}"
                continue
            except Exception:
                failed[f"{name}, {way.name}"] = traceback.format_exc()
                print(f"{name}, {way.name} FAILED\n{traceback.format_exc()}", flush=True)
                continue
            expected = expected or found
            points.append(point)
            print(point, flush=True)
        points = _with_turns(case, ways, points)
    promises = checks(points)
    print("\n".join(f"{'yes' if check.met else 'NO '}  {check.promise}: {check.measured}" for check in promises))
    for what, why in failed.items():
        print(f"{what}: {why.splitlines()[-1]}")
    if arguments.out:
        results: Mapping[str, object] = {
            "environment": facts,
            "points": [asdict(point) for point in points],
            "checks": [asdict(check) for check in promises],
            "failed": failed,
        }
        Path(arguments.out).write_text(json.dumps(results, indent=2))
    if arguments.plot:
        plot(points, arguments.plot)
    broken = [why for why in failed.values() if not why.startswith("not here")]
    return int(bool(broken) or any(not check.met for check in promises))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[], help=f"of {', '.join(cases())}")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[""], help="parts of names: ours,FSDP2")
    parser.add_argument("--layers", type=int, help="smaller models, to try the benchmark itself")
    parser.add_argument("--out", help="a JSON file for all figures")
    parser.add_argument("--plot", help="a picture of memory against time")
    parser.add_argument("--limit", type=float, default=420, help="seconds after which nothing further is begun")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
