"""Runs a benchmark on a GPU that is not there: how much memory it takes, and about how long.

    PYTHONPATH=src python benchmarks/simulated.py training.py --cases 3B-2048 --ways checkpointing,ours

The device (`tests/simulated_gpu`, timed) computes nothing: kernels and copies take the time that an H200 would take, by
a model, while the host's own work takes what it takes here. A machine with two cores and without a GPU runs models of
any size, in seconds. What such figures are good for:

- The peak of allocated memory is the hardware's: torch and overspill ask for the same tensors, in the same order. What
  an allocator reserves beyond is not.
- Times show what waits for what, and what a change does to that. They are a model's: never publish them as measured.
  `--faster 4` is a device that is four times as fast, to see how a slow host holds it up.
- Values are none: that bits are the same, which a benchmark may print, says nothing here.

Pinned memory is never touched, so it takes nothing of this machine. Peers that ask CUDA itself for something, such as
FSDP2, do not run.
"""

import argparse
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))

from simulated_gpu.device import Rates, install_timed  # noqa: E402  # it is found by the line above

GIB = 1 << 30
HOST_MEMORY = 128 * GIB
"""What the host says that it has: a machine with such a GPU has as much."""


def take_no_host_memory() -> None:
    """Have overspill leave what it pins untouched, and believe that there is enough of it."""
    import overspill.devices
    import overspill.slab
    import overspill.store

    for module in (overspill.devices, overspill.slab, overspill.store):
        module.touch = lambda memory: None
    overspill.devices._host_memory = lambda: (HOST_MEMORY, HOST_MEMORY)


def main() -> None:
    """Put the device there, which must be before torch is imported, and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faster", type=float, default=1, metavar="FACTOR", help="than an H200")
    parser.add_argument("benchmark", help="a file beside this one")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    options = parser.parse_args()
    install_timed(Rates().times(options.faster))
    take_no_host_memory()
    print("simulated: memory is the hardware's, times are a model's and never to be published, bits say nothing")
    sys.argv = [options.benchmark, *options.arguments]
    runpy.run_path(str(HERE / options.benchmark), run_name="__main__")


if __name__ == "__main__":
    main()
