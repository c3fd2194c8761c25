"""Tests of the simulated device itself: nothing to run where there is none."""

import pytest
import torch

from simulated_gpu.device import delayed, is_installed

collect_ignore_glob = [] if is_installed() else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _all_is_imported() -> None:
    """Torch imports half of itself for the first shapes without values, for longer than tests keep a stream busy."""
    with delayed(1):  # so that all is queued
        x = torch.ones(8, 8, device="cuda:0")
        torch.nn.functional.gelu(x @ x).add_(1).softmax(-1).cpu()
