"""What overspill costs beside moving bytes: its import, its plans, a model that fits, and training of tiny blocks.

    PYTHONPATH=src python3 benchmarks/overhead.py --out results.json

Runs on any machine in about a minute. Ends with status 1 when a promise was not kept.
"""

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import infer_auto_device_map
from common import Check, Row, Timing, alternate, environment, repeat, report, synchronize, table, time_once
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import overspill

IMPORT_LIMIT: Final = 0.3
"""Seconds beyond torch's own import."""
PLAN_LIMIT: Final = 2.0
"""Seconds for the largest of these models."""
PLANNED: Final = (1_000, 10_000, 50_000)
"""Tensors of a model that is planned."""
TENSORS_A_BLOCK: Final = 10
LAYERS: Final = 300
"""Of the model that fits: small ones, so that whatever is done a layer shows."""
TRAINED_BLOCKS: Final = 28
IN_A_ROW: Final = 10
"""Passes on the clock at once, since one takes less than a millisecond."""


# Import.


def importing(times: int) -> Row:
    """`import overspill` after `import torch`, in fresh processes."""
    program = (
        "import time; start = time.perf_counter(); import torch; between = time.perf_counter(); import overspill; "
        "print(between - start, time.perf_counter() - between)"
    )
    with tempfile.TemporaryDirectory() as compiled:  # as an installed library is, whatever this process was told
        found = [_seconds_printed(program, compiled) for _ in range(times + 1)][1:]  # the first one compiles
    torches, ours = (Timing(tuple(samples)) for samples in zip(*found, strict=True))
    return Row(
        name="import",
        what="import overspill, beyond torch",
        ours=ours,
        targets=[Check.at_most(f"≤ {IMPORT_LIMIT} s", ours.median, IMPORT_LIMIT, "s")],
        details={"import torch, s": str(torches)},
    )


def _seconds_printed(program: str, compiled: str) -> list[float]:
    settings = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


# Plans.


class Block(nn.Module):
    """Ten matrices that move as one."""

    def __init__(self) -> None:
        super().__init__()
        for part in range(TENSORS_A_BLOCK):
            self.add_module(f"part{part}", nn.Linear(512, 512, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


def stack_of(tensors: int) -> nn.Module:
    """A skeleton with so many tensors."""
    with overspill.empty_weights():
        return nn.Sequential(*(Block() for _ in range(tensors // TENSORS_A_BLOCK)))


def planning(times: int) -> list[Row]:
    """Plans of ever larger models for a GPU, which need not be there: some of it on each tier.

    Whether the time is linear is asked with Python's garbage collector off: what that takes depends on all objects of
    the process, ours or not.
    """
    rows: list[Row] = []
    a_tensor: list[float] = []
    for tensors in PLANNED:
        model = stack_of(tensors)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        budget: dict[int | str, int] = {0: nbytes // 3, "cpu": nbytes // 3}
        plan = partial(overspill.plan, model, budget, device=0)
        ours = repeat(plan, times)
        a_tensor.append(_without_collector(plan, times).median / tensors)
        automatic = partial(infer_auto_device_map, model, {"cpu": nbytes // 2}, no_split_module_classes=["Block"])
        theirs = repeat(automatic, 1, warm_up=0)  # one is enough: with the largest model it takes seconds
        rows.append(
            Row(
                name=f"plan-{tensors}",
                what=f"plan a model of {tensors:,} tensors",
                ours=ours,
                peer=theirs,
                peer_is="Accelerate",
                targets=_plan_targets(ours, a_tensor) if tensors == PLANNED[-1] else [],
                details={
                    "a tensor, µs": ours.median / tensors * 1e6,
                    "a tensor without the garbage collector, µs": a_tensor[-1] * 1e6,
                },
            )
        )
    return rows


def _without_collector(run: Callable[[], object], times: int) -> Timing:
    gc.collect()
    gc.disable()
    try:
        return Timing(tuple(time_once(run) for _ in range(times)))
    finally:
        gc.enable()


def _plan_targets(largest: Timing, a_tensor: Sequence[float]) -> list[Check]:
    return [
        Check.at_most(f"≤ {PLAN_LIMIT:.0f} s", largest.median, PLAN_LIMIT, "s"),
        Check.at_most(f"linear: a tensor ≤ 1.5 × as much as with {PLANNED[0]:,}", a_tensor[-1] / a_tensor[0], 1.5),
    ]


# A model that fits.


def resident(times: int) -> Row:
    """A forward through many small layers, all of them where they compute, beside the plain model's."""
    torch.set_num_threads(1)  # a pool of threads would cost more than the layers, and not the same twice
    plain = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS))).eval()
    with tempfile.TemporaryDirectory(prefix="overspill-") as folder:
        overspill.save(plain, folder, progress=False)
        with overspill.empty_weights():
            ours = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS))).eval()
        plan = overspill.plan(ours, {"cpu": "1GB"}, device="cpu")
        assert plan.streamed_bytes == 0
        overspill.load(ours, folder, plan, progress=False)
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        same_bits = torch.equal(ours(x), plain(x))
        timing, plains = alternate(_passes(ours, x), _passes(plain, x), times)
    timing, plains = (Timing(tuple(s / IN_A_ROW for s in each.samples)) for each in (timing, plains))
    return Row(
        name="resident",
        what=f"forward through {LAYERS} small layers, all resident, on the CPU",
        ours=timing,
        line=plains.median,
        line_is=f"the plain model, {plains} s",
        targets=[Check.at_most("≤ 1.01 × the plain model", timing.median / plains.median, 1.01)],
        checks=[Check("same bits as the plain model", "yes" if same_bits else "no", same_bits)],
        details={"fastest pass over the plain model's fastest": min(timing.samples) / min(plains.samples)},
    )


def _passes(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(IN_A_ROW):
            model(x)

    return run


# Training.


class TinyBlock(nn.Module):
    """A decoder block as in Llama, so small that a step is nothing but what the host does for it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class TinyStack(nn.Module):
    """Some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(TRAINED_BLOCKS))
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def training(times: int) -> Row:
    """A step with weights in host memory and recomputed blocks, beside checkpointing with resident weights."""
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    plain = TinyStack().to(device)
    ours = copy.deepcopy(plain)
    plain.checkpointed = True
    overspill.offload_training(ours, activations=False, weights=True, recompute=True)
    x = torch.randn(1, 16, 64, device=device)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        synchronize()

    timing, theirs = alternate(partial(step, ours), partial(step, plain), times)
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    same_bits = all(torch.equal(mine.grad.cpu(), other.grad.cpu()) for mine, other in pairs)  # type: ignore[union-attr]
    return Row(
        name="training",
        what=f"train {TRAINED_BLOCKS} tiny blocks, weights in host memory, recomputed, on {device.type}",
        ours=timing,
        peer=theirs,
        peer_is="checkpointing, resident",
        checks=[Check("same bits as checkpointing", "yes" if same_bits else "no", same_bits)],
        details={"more than checkpointing, µs a block": (timing.median - theirs.median) / TRAINED_BLOCKS * 1e6},
    )


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--out", help="a JSON file for all figures")
    arguments = parser.parse_args()
    facts = environment()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    start = time.perf_counter()
    quick = arguments.quick
    rows = [importing(3 if quick else 7), *planning(3 if quick else 5), resident(100 if quick else 500)]
    rows.append(training(10 if quick else 100))
    print("\n" + "\n\n".join(report(row) for row in rows))
    print(f"\n{table(rows)}\n\nall of it took {time.perf_counter() - start:.0f} s")
    if arguments.out:
        results: Mapping[str, Any] = {"environment": facts, "rows": [row.as_json() for row in rows]}
        Path(arguments.out).write_text(json.dumps(results, indent=2))
    return int(any(not check.met for row in rows for check in row.all_checks))


if __name__ == "__main__":
    raise SystemExit(main())
