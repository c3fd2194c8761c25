"""The timed device: how long things take on it, and that as much memory is taken as where they are computed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulated_gpu.device import Rates
from simulated_gpu.plugin import CHILDREN
from support import run_program

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20
WORKSPACE = 32 * MIB
"""What products take beside, in each thread that asks for them. The device that computes takes none."""
DRAWN = 512
"""What flash attention keeps of its random numbers. The device that computes has another kernel, which draws none."""

TIMED = """
    import json, time
    from simulated_gpu.device import Rates, install_timed

    def timed(work):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before = time.perf_counter()
        start.record()
        work()
        end.record()
        host = time.perf_counter() - before
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000, host, time.perf_counter() - before
"""

BLOCKS = """
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in [(256, 256)] * 4 + [(256, 1024)] * 2)
            self.down = nn.Linear(1024, 256, bias=False)

        def forward(self, x):
            normal = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
            q, k, v, out, gate, up = self.inner
            heads = [part(normal).view(2, 512, 4, 64).transpose(1, 2) for part in (q, k, v)]
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + out(attended.transpose(1, 2).reshape(x.shape))
            return x + self.down(functional.silu(gate(x)) * up(x))

    for checkpointed in (False, True):
        with torch.device("cuda:0"):
            model = nn.ModuleList(Block() for _ in range(4)).to(torch.bfloat16)
            x = torch.randn(2, 512, 256, dtype=torch.bfloat16)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            y = x
            for block in model:
                y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
            y.float().square().mean().backward()
            del y
        print(torch.cuda.max_memory_allocated(), flush=True)

    import os
    os._exit(0)  # autograd's thread may clean up yet, which aborts a Python that ends meanwhile
"""


@pytest.fixture
def run_timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a program that has no device yet, and installs its own."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != CHILDREN])
    return run_program


def test_a_copy_takes_its_bytes_over_the_links_rate(run_timed: Callable[..., str]) -> None:
    printed = run_timed(
        TIMED
        + """
    install_timed(Rates(link=1e9))
    import torch
    device = torch.empty(200_000_000, dtype=torch.uint8, device="cuda:0")
    pinned = torch.empty(200_000_000, dtype=torch.uint8, pin_memory=True)
    side = torch.Stream(device="cuda:0")

    def both_ways():
        device.copy_(pinned, non_blocking=True)
        with side:
            pinned.copy_(device, non_blocking=True)
        torch.accelerator.current_stream().wait_stream(side)

    print(json.dumps([timed(lambda: device.copy_(pinned, non_blocking=True)), timed(both_ways)]))
    """
    )
    (one_way, host, waited), (both, *_) = json.loads(printed)
    assert 0.2 <= one_way < 0.3
    assert 0.2 <= both < 0.4, "one does not wait for the other"
    assert host < 0.2, "the host goes on"
    assert waited >= one_way


def test_the_host_runs_ahead_of_kernels_until_it_asks_for_a_number(run_timed: Callable[..., str]) -> None:
    printed = run_timed(
        TIMED
        + """
    install_timed(Rates(products=1e12))
    import torch
    x = torch.empty(5000, 5000, device="cuda:0")
    x @ x  # torch imports what it computes shapes with
    print(json.dumps([timed(lambda: x @ x), timed(lambda: (x @ x)[0, 0].item())]))
    """
    )
    (device, host, waited), (_, host_asking, _) = json.loads(printed)
    expected = 2 * 5000**3 / 1e12
    assert expected <= device < 2 * expected
    assert host < expected <= waited
    assert host_asking >= expected


def test_as_much_memory_is_taken_as_where_it_is_computed(run_timed: Callable[..., str]) -> None:
    timed = run_timed(TIMED + "    install_timed(Rates())\n" + BLOCKS)
    computed = run_timed("    from simulated_gpu.device import install\n    install()\n" + BLOCKS)
    plain, checkpointed = (int(peak) for peak in computed.split())
    assert checkpointed < plain
    threads, blocks = 2, 4  # this thread and autograd's; of blocks that are recomputed one at a time is kept
    expected = [plain + blocks * DRAWN, checkpointed + DRAWN]
    assert [int(peak) - threads * WORKSPACE for peak in timed.split()] == expected


def test_memory_that_no_host_has_can_be_taken(run_timed: Callable[..., str]) -> None:
    program = """
    from simulated_gpu.device import Rates, install_timed
    install_timed(Rates())
    import torch
    print(torch.empty(130 << 30, dtype=torch.uint8, device="cuda:0").nbytes)
    """
    assert int(run_timed(program)) == 130 << 30


def test_a_faster_device_takes_less_of_everything() -> None:
    twice = Rates().times(2)
    assert twice.link == 2 * Rates().link
    assert twice.launch == Rates().launch / 2


def test_a_benchmark_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent / "src"))
    command = [sys.executable, str(BENCHMARKS / "simulated.py"), "training.py", "--cases", "8B-2x4096"]
    options = ["--layers", "2", "--ways", "checkpointing"]
    done = subprocess.run([*command, *options], check=False, capture_output=True, text=True, timeout=200)
    assert "GB" in done.stdout, done.stderr
    assert "never to be published" in done.stdout
