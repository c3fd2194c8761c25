"""What a training step waits for, and takes, on the timed device: blocks of models that no machine here could hold.

Figures are an H200's by a model, so bounds are those of `benchmarks/training.py`, or lie between what a schedule that
hides its copies takes and one that does not.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulated_gpu.plugin import CHILDREN
from support import run_program

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GB = 10**9

_Measured = Callable[..., dict[str, dict[str, float]]]

STEPS = """
    import json, sys
    from dataclasses import replace
    from simulated_gpu.device import Rates, install_timed
    install_timed(Rates())
    sys.path.append({folder!r})
    import simulated
    simulated.take_no_host_memory()
    import training
    from overspill.training.activations import Activations

    case, ways = training.cases()[{case!r}]
    case = replace(case, shape=case.shape.cut({layers}))
    known = {{way.name: way for way in ways}} | {{"plain": training.PEERS["plain"]}}
    sent, steps = [], {{}}
    init = Activations.__init__

    def noting(self, *arguments, **options):
        init(self, *arguments, **options)
        sent.append(self)

    Activations.__init__ = noting
    for name in {names!r}:
        sent.clear()
        way = replace(known[name], times=3, compared=False)
        point, _ = training.measure(case, way, None)
        nbytes = max([each.nbytes_sent for each in sent], default=0) / (way.times + way.warm_up)
        steps[name] = {{"seconds": min(point.samples), "allocated": point.allocated, "sent": nbytes / Rates().link}}
    print(json.dumps(steps), flush=True)

    import os
    os._exit(0)  # autograd's thread may clean up yet, which aborts a Python that ends meanwhile
"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> _Measured:
    """Steps of a benchmark's case by the names of the ways that they are taken: seconds, peaks, what leaves takes."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != CHILDREN])

    def measure(case: str, layers: int, *names: str) -> dict[str, dict[str, float]]:
        program = STEPS.format(folder=str(BENCHMARKS), case=case, layers=layers, names=names)
        steps: dict[str, dict[str, float]] = json.loads(run_program(program, timeout=200).splitlines()[-1])
        return steps

    return measure


def test_what_was_offloaded_comes_back_while_backward_computes(measured: _Measured) -> None:
    steps = measured("8B-4x8192", 4, "plain", "ours: activations")
    plain, ours = steps["plain"], steps["ours: activations"]
    assert ours["sent"] > plain["seconds"]
    assert ours["allocated"] < plain["allocated"] / 2
    # 0.78 × of them one after the other; 0.83 where one tensor at a time comes ahead of its need, 0.93 where none does.
    assert ours["seconds"] <= 0.81 * (plain["seconds"] + 2 * ours["sent"])


def test_inputs_of_recomputed_blocks_are_not_waited_for(measured: _Measured) -> None:
    steps = measured("8B-4x8192", 4, "checkpointing", "ours: recompute + inputs")
    checkpointing, ours = steps["checkpointing"], steps["ours: recompute + inputs"]
    assert ours["sent"] > 0
    assert ours["allocated"] < checkpointing["allocated"]
    assert ours["seconds"] <= 0.97 * checkpointing["seconds"], "0.985 × where each is waited for"


def test_weights_come_while_blocks_compute(measured: _Measured) -> None:
    steps = measured("3B-8192", 8, "checkpointing", "ours: weights, recompute")
    checkpointing, ours = steps["checkpointing"], steps["ours: weights, recompute"]
    assert ours["allocated"] < 0.75 * checkpointing["allocated"]
    assert ours["seconds"] <= 1.08 * checkpointing["seconds"]


def test_a_budget_of_memory_is_not_exceeded(measured: _Measured) -> None:
    (ours,) = measured("8B-4x8192", 8, "ours: memory=13.4GB").values()
    assert ours["sent"] > 0
    assert ours["allocated"] <= 13.4 * GB
