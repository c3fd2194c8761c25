"""What every test can rely on: no network, one thread a process, the same random numbers, a GPU if it asks for one."""

import os

# Before torch and the hub's client are imported, which read them once; subprocesses inherit them.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # xdist's workers share the cores
        # Some virtual machines promise matrix instructions (AMX) and then fail on them, in torch's own bf16 products.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "TOKENIZERS_PARALLELISM": "false",
    }
)

import threading
from collections import Counter
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest
import torch

from overspill.checkpoint.reader import FileReader
from overspill.mapping import MappedPiece, MappedSlab
from overspill.transfer import Transfer
from support import Where, drain, map_everything

# A failure must come back on the next run, on any machine, however slow.
hypothesis.settings.register_profile("overspill", database=None, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("overspill")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_under_way() -> None:
    """What an earlier test's model reads ahead, for a call that never comes, is not counted in this one."""
    drain()


def pytest_collection_finish(session: pytest.Session) -> None:
    """A GPU test that was asked for is run or is an error; it never counts as passed where it could not run."""
    gpu_tests = [item for item in session.items if item.get_closest_marker("gpu")]
    if gpu_tests and not session.config.option.collectonly and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"{len(gpu_tests)} tests need a CUDA device, and torch {torch.__version__} sees none. Run them where one "
            "is, with a Python whose torch is built for it: make gpu-test GPU_PYTHON=/path/to/python. Or on one "
            "that is simulated: make simulated-gpu-test"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A GPU test that skips itself fails: where a CUDA device exists, none of them is skipped."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped itself, and a GPU test may not: {report.longrepr}"
    return report


@pytest.fixture(params=[pytest.param("cpu"), pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the model computes: a test that takes this runs on the CPU, and on a GPU with `make gpu-test`."""
    return str(request.param)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read from disk, or used where they lie there, and copied from host memory since this was last cleared."""
    count: Counter[str] = Counter()
    lock = threading.Lock()  # several threads read at once
    read, read_aligned, from_host = FileReader.read, FileReader.read_aligned, Transfer.from_host
    pieces = MappedSlab.pieces

    def note(tier: str, nbytes: int) -> None:
        with lock:
            count[tier] += nbytes

    def counting_read(self: FileReader, file: Any, offset: int, target: memoryview) -> None:
        note("disk", len(target))
        read(self, file, offset, target)

    def counting_read_aligned(self: FileReader, file: Any, offset: int, nbytes: int, scratch: memoryview) -> int:
        note("disk", nbytes)
        return read_aligned(self, file, offset, nbytes, scratch)

    def counting_pieces(self: MappedSlab) -> list[MappedPiece]:
        note("disk", sum(run.nbytes for run in self.mapping.runs))
        return pieces(self)

    def counting_copy(self: Transfer, sources: Any, slab: Any) -> Any:
        note("cpu", sum(source.nbytes for _, source in sources))
        return from_host(self, sources, slab)

    monkeypatch.setattr(FileReader, "read", counting_read)
    monkeypatch.setattr(FileReader, "read_aligned", counting_read_aligned)
    monkeypatch.setattr(MappedSlab, "pieces", counting_pieces)
    monkeypatch.setattr(Transfer, "from_host", counting_copy)
    return count


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU computes, what is on disk is computed with where it lies, however small it is."""
    map_everything(monkeypatch)


@pytest.fixture(
    params=[
        pytest.param(Where("cpu", "disk"), id="cpu-disk"),
        pytest.param(Where("cpu", "cpu"), id="cpu-cpu"),
        pytest.param(Where("cuda:0", "disk"), id="cuda-disk", marks=pytest.mark.gpu),
        pytest.param(Where("cuda:0", "cpu"), id="cuda-cpu", marks=pytest.mark.gpu),
    ]
)
def where(request: pytest.FixtureRequest) -> Where:
    where: Where = request.param
    if where == Where("cpu", "disk"):
        request.getfixturevalue("mapped")  # without gradients, that is
    return where
