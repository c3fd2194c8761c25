"""For pytest: the tests that need a CUDA device, on the simulated one. `make simulated-gpu-test` loads this."""

import os
import sys
from pathlib import Path

import pytest

from simulated_gpu.build import CannotSimulateError
from simulated_gpu.device import install, longest_delay

HERE = Path(__file__).parent

try:
    install()
except CannotSimulateError as error:
    raise pytest.UsageError(str(error)) from error

# Processes that tests start are given one of these two.
CHILDREN = str(HERE / "children")
sys.path.append(CHILDREN)
os.environ["PYTHONPATH"] = os.pathsep.join([CHILDREN, str(HERE.parent), os.environ.get("PYTHONPATH", "")])


def pytest_report_header() -> str:
    return f"CUDA device: simulated, with delays of up to {longest_delay()} µs (SIMULATED_DELAY)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only hardware can show, each marked with the reason. Nothing else is left out."""
    left_out = [item for item in items if item.get_closest_marker("real_gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
