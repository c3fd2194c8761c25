"""Tensors made of stored ones: their bytes where they lie, and their elements a few at a time."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from overspill.checkpoint import CheckpointIndex, conversion, open_checkpoint
from overspill.checkpoint.conversion import ConvertedTensor, chunks_of
from overspill.checkpoint.reader import FileReader
from overspill.checkpoint.traced import Traced

A, B = torch.arange(24.0).reshape(4, 6), torch.arange(100.0, 112.0).reshape(2, 6)


@pytest.fixture
def stored(tmp_path: Path) -> CheckpointIndex:
    save_file({"before": torch.ones(5), "a": A}, tmp_path / "1.safetensors")
    save_file({"b": B}, tmp_path / "2.safetensors")
    return open_checkpoint(tmp_path)


def made(stored: CheckpointIndex, *, transposed: bool) -> ConvertedTensor:
    joined = torch.cat([Traced.source(name, stored[name].spec) for name in "ab"])
    found = joined.t() if transposed else joined
    assert isinstance(found, Traced)
    return ConvertedTensor("ab", found.rearrangement(), stored)


def test_it_says_what_it_takes_and_which_files(stored: CheckpointIndex) -> None:
    found = made(stored, transposed=False)
    assert found.nbytes == 36 * 4
    assert [file.path.name for file in found.files] == ["1.safetensors", "2.safetensors"]


def test_its_spans_are_its_bytes(stored: CheckpointIndex) -> None:
    spans = made(stored, transposed=False).spans
    assert spans is not None
    content = b"".join(span.file.path.read_bytes()[span.offset : span.offset + span.nbytes] for span in spans)
    assert torch.equal(torch.frombuffer(bytearray(content), dtype=torch.float32), torch.cat([A, B]).view(-1))


@pytest.mark.parametrize("at_once", [4, 20, 28, 96, 1 << 20])
def test_chunks_of_what_is_stored_are_its_elements_in_order(
    at_once: int, stored: CheckpointIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_READ_AT_ONCE", at_once)
    chunks = list(chunks_of(stored["a"], FileReader()))
    assert torch.equal(torch.cat(chunks), A.view(-1))
    most = at_once // 4
    assert [len(chunk) for chunk in chunks] == [min(most, 24 - start) for start in range(0, 24, most)]


@pytest.mark.parametrize("transposed", [False, True])
def test_chunks_of_what_is_made_are_its_elements_in_order(transposed: bool, stored: CheckpointIndex) -> None:
    joined = torch.cat([A, B])
    chunks = list(chunks_of(made(stored, transposed=transposed), FileReader()))
    assert torch.equal(torch.cat(chunks), (joined.t() if transposed else joined).reshape(-1))
