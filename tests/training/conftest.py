"""What every test of training can rely on: saved tensors really leave, however small the model is."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; deterministic products need it

from collections.abc import Iterator

import pytest
import torch

from overspill.training.activations import Limits


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is too small to leave, none stays because it was saved last, and some come back ahead of need."""

    def tiny(cls: type[Limits], device: torch.device, *, double_buffering: bool = True) -> Limits:
        return cls(small=0, held=0, ahead=1 << 13)

    monkeypatch.setattr(Limits, "usual", classmethod(tiny))


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
