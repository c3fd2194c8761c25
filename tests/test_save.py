"""A save writes what the model is, from every tier, and a kill, a full disk or another thread cannot spoil it."""

import contextlib
import copy
import errno
import itertools
import json
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import overspill
from overspill.checkpoint import open_checkpoint, writer
from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.publishing import _Publication
from overspill.errors import (
    BudgetError,
    CheckpointChangedError,
    CheckpointReadError,
    OverspillError,
    SaveError,
    StateError,
)
from overspill.homes import DiskTensor
from overspill.tensors import TensorSpec
from support import Block, Net, aligned, loaded, run_program, save_checkpoint, streamed_units

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ALL_TIERS = ["device", "cpu", "disk", "mixed"]
TINY = 6000  # bytes: several shards of these models, and some tensors larger than that
IDS = torch.arange(24).view(2, 12)
State = dict[str, torch.Tensor]


class NormedBlock(Block):
    """A block with running statistics, an integer buffer, bf16, a scalar, nothing at all, and a buffer not stored."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.thin = nn.Linear(width, width, dtype=torch.bfloat16)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("order", torch.randperm(width))
        self.register_buffer("scratch", torch.randn(width), persistent=False)

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        x = super().forward(x, gain=gain)[..., self.get_buffer("order")]
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.gate * self.thin(x.bfloat16()).to(x.dtype) + self.get_buffer("scratch")


class Model(nn.Module):
    """An embedding that the head is tied to, and blocks."""

    def __init__(self, blocks: int = 3, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(NormedBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, gain=0.5)
        logits: torch.Tensor = self.head(x)
        return logits


def state_of(model: nn.Module, *, without: tuple[str, ...] = ("head.weight",)) -> State:
    """What a save must write of a model in memory: copies."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name not in without}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        there = found[name]
        assert TensorSpec.of(there) == TensorSpec.of(tensor), name
        assert torch.equal(bits(there), bits(tensor)), name


def read_file(path: Path) -> State:
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read(folder: Path) -> State:
    """The checkpoint as Transformers finds it, one file before an index. The index must be right."""
    if (folder / WHOLE).exists():
        return read_file(folder / WHOLE)
    index = json.loads((folder / INDEX).read_text())
    found: State = {}
    for shard in sorted(set(index["weight_map"].values())):
        content = read_file(folder / shard)
        assert not found.keys() & content.keys(), "a key is stored twice"
        assert {index["weight_map"].get(name) for name in content} == {shard}
        found |= content
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def files_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def usual_names(count: int) -> set[str]:
    return {INDEX, *(f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1))} if count > 1 else {WHOLE}


def assert_saved(folder: Path, expected: Mapping[str, torch.Tensor], *others: str) -> None:
    """`folder` holds the checkpoint under its usual names, `others`, and nothing else."""
    assert_same(read(folder), expected)
    names = files_in(folder) - {*others}
    assert names == usual_names(sum(name.endswith(".safetensors") for name in names))
    stored = open_checkpoint(folder)
    assert {name: tensor.spec for name, tensor in stored.items()} == {n: TensorSpec.of(t) for n, t in expected.items()}


def write_whole(state: State, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / WHOLE, metadata={"format": "pt"})
    return folder


def write_shards(state: State, folder: Path, count: int = 4) -> Path:
    """As another tool would."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(usual_names(count) - {INDEX})
    weight_map = {key: names[position % count] for position, key in enumerate(state)}
    for name in names:
        save_file({k: t for k, t in state.items() if weight_map[k] == name}, folder / name, metadata={"format": "pt"})
    metadata = {"total_size": sum(tensor.nbytes for tensor in state.values())}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return folder


WRITE: dict[str, Callable[[State, Path], Path]] = {"one": write_whole, "shards": write_shards}


def run(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(ids)
    return output


def disk_homes(model: nn.Module) -> list[DiskTensor]:
    return [t for t in itertools.chain(model.parameters(), model.buffers()) if isinstance(t, DiskTensor)]


def forget_open_files(model: nn.Module) -> None:
    """A file that is read after this must be there under its name."""
    for home in disk_homes(model):
        reader: Any = home._overspill_values.reader
        reader.close()


def assert_right(model: nn.Module, reference: nn.Module) -> None:
    """Every value, read anew, and a forward."""
    forget_open_files(model)
    assert_same(overspill.state_dict(model), state_of(reference))
    forget_open_files(model)
    assert torch.equal(run(model), run(reference))


@pytest.fixture
def reference() -> nn.Module:
    return aligned(Model()).eval()


@pytest.fixture
def source(reference: nn.Module, tmp_path: Path) -> Path:
    return write_whole(state_of(reference), tmp_path / "source")


def like(reference: nn.Module) -> Callable[[], nn.Module]:
    """Builds such a model, with its buffers that no checkpoint stores."""

    def build() -> nn.Module:
        model = Model()
        with torch.no_grad():
            for ours, theirs in zip(model.blocks, reference.get_submodule("blocks").children(), strict=True):
                ours.get_buffer("scratch").copy_(theirs.get_buffer("scratch"))
        return model

    return build


@pytest.fixture
def model(reference: nn.Module, source: Path) -> nn.Module:
    """All of it on disk."""
    return loaded(like(reference), source, "disk")


def save(model: nn.Module, folder: Path, **options: Any) -> None:
    overspill.save(model, folder, progress=False, **options)


# ---------------------------------------------------------------- what is written, from every tier


def untouched(model: nn.Module) -> None:
    """Before any forward."""


def edited_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for block in model.get_submodule("blocks").children():
            block.get_parameter("up.weight").mul_(1.5)
            block.get_parameter("thin.weight")[0] = 2
            block.get_buffer("order").copy_(block.get_buffer("order").flip(0))
        model.get_parameter("embed.weight").add_(1)


def edited_through_data(model: nn.Module) -> None:
    for block in model.get_submodule("blocks").children():
        block.get_parameter("down.weight").data.add_(0.25)
        block.get_parameter("scale").data = block.get_parameter("scale").detach() * 2
    model.get_parameter("embed.weight").data[3] = 7


def after_a_forward(model: nn.Module) -> None:
    run(model)


def after_training_forwards(model: nn.Module) -> None:
    """Running statistics and the count of batches have changed, and nothing else."""
    model.train()
    for ids in (IDS, IDS.flip(1)):
        run(model, ids)
    model.eval()


def after_a_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.numel()), lr=0.1)
    model(IDS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


CHANGES = [untouched, edited_in_place, edited_through_data, after_a_forward, after_training_forwards, after_a_step]
TARGETS = ["new one", "new shards", "one over one", "shards over one", "one over shards", "shards over shards"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tier", ALL_TIERS)
def test_a_save_holds_every_bit_of_the_model(
    tier: str, target: str, change: Callable[[nn.Module], None], reference: nn.Module, tmp_path: Path
) -> None:
    kind, _, old = target.partition(" over ")
    source = WRITE[old or "one"](state_of(reference), tmp_path / "source")
    model = loaded(like(reference), source, tier)
    change(model)
    change(reference)
    folder = source if old else tmp_path / "saved"

    save(model, folder, max_shard_size="1GB" if kind.endswith("one") else TINY)

    assert_saved(folder, state_of(reference))
    assert (folder / WHOLE).exists() == kind.endswith("one")
    assert_right(model, reference)
    if old:
        save(model, folder, max_shard_size=2 * TINY)
        assert_saved(folder, state_of(reference))
        assert_right(model, reference)


@pytest.mark.parametrize("tier", ALL_TIERS)
def test_what_is_loaded_from_a_save_computes_the_same(tier: str, reference: nn.Module, tmp_path: Path) -> None:
    source = write_shards(state_of(reference), tmp_path / "source")
    model = loaded(like(reference), source, tier)
    after_training_forwards(model)
    after_training_forwards(reference)
    save(model, tmp_path / "saved", max_shard_size=TINY)
    again = loaded(like(reference), tmp_path / "saved", tier)
    assert torch.equal(run(again), run(reference))
    assert again.get_parameter("head.weight") is again.get_parameter("embed.weight")


ROUND_TRIPS = ["llama", "llama-tied", "gpt2", "bert", "t5", "marian", "resnet", "convnext"]


@pytest.mark.filterwarnings("ignore:.*deprecated.*")  # Transformers' own
@pytest.mark.parametrize("tier", ["disk", "mixed"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_transformers_reads_a_save_as_its_own(name: str, tier: str, tmp_path: Path) -> None:
    from models import ARCHITECTURES, randomized  # here, for the programs that import this file

    architecture = next(a for a in ARCHITECTURES if a.name == name)
    reference: Any = randomized(architecture.build()).eval()
    reference.save_pretrained(tmp_path / "theirs")
    model: Any = loaded(architecture.build, save_checkpoint(reference, tmp_path / "source"), tier)

    save(model, tmp_path / "ours", max_shard_size="300KB" if tier == "mixed" else "5GB")
    model.config.save_pretrained(tmp_path / "ours")

    assert_same(read(tmp_path / "ours"), read(tmp_path / "theirs"))
    found, expected = (type(reference).from_pretrained(tmp_path / whose) for whose in ("ours", "theirs"))
    assert_same(found.state_dict(), expected.state_dict())


def test_dtypes_that_differ_within_a_model_are_kept(tmp_path: Path) -> None:
    from models import ARCHITECTURES

    architecture = next(a for a in ARCHITECTURES if a.name == "t5")
    model: Any = architecture.build().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("wo.weight"):
            parameter.data = parameter.data.float()
    save(model, tmp_path / "saved")
    found = read(tmp_path / "saved")
    kinds = {name: tensor.dtype for name, tensor in found.items()}
    assert set(kinds.values()) == {torch.bfloat16, torch.float32}
    assert all((dtype is torch.float32) == name.endswith("wo.weight") for name, dtype in kinds.items())


@pytest.mark.parametrize("max_shard_size", ["5GB", TINY])
def test_a_model_that_overspill_never_saw(max_shard_size: int | str, reference: nn.Module, tmp_path: Path) -> None:
    before = {name: id(tensor) for name, tensor in reference.state_dict(keep_vars=True).items()}
    save(reference, tmp_path / "saved", max_shard_size=max_shard_size)
    assert_saved(tmp_path / "saved", state_of(reference))
    assert {name: id(tensor) for name, tensor in reference.state_dict(keep_vars=True).items()} == before


@pytest.mark.parametrize("modules", [None, ["blocks.1"]], ids=["all", "a part"])
def test_a_model_that_was_offloaded_or_restored(
    modules: list[str] | None, reference: nn.Module, tmp_path: Path
) -> None:
    model = copy.deepcopy(reference)
    overspill.offload(model, to="disk", modules=modules, folder=tmp_path / "offload", min_bytes=0)
    edited_in_place(model)
    edited_in_place(reference)
    save(model, tmp_path / "saved", max_shard_size=TINY)
    assert_saved(tmp_path / "saved", state_of(reference))
    overspill.offload(model, to="cpu", modules=modules, min_bytes=0)
    save(model, tmp_path / "from memory")
    assert_saved(tmp_path / "from memory", state_of(reference))
    overspill.restore(model)
    save(model, tmp_path / "saved")
    assert_saved(tmp_path / "saved", state_of(reference))


def test_a_loaded_model_that_was_restored_can_be_saved_over_its_source(
    model: nn.Module, reference: nn.Module, source: Path
) -> None:
    overspill.restore(model)
    edited_in_place(model)
    edited_in_place(reference)
    save(model, source, max_shard_size=TINY)
    assert_saved(source, state_of(reference))


def test_files_of_an_offload_are_no_part_of_a_checkpoint_and_stay(reference: nn.Module, tmp_path: Path) -> None:
    model = copy.deepcopy(reference)
    offloaded = overspill.offload(model, to="disk", folder=tmp_path / "offload", min_bytes=0)
    save(model, tmp_path / "saved")
    assert offloaded.files
    assert all(file.exists() for file in offloaded.files)
    shutil.rmtree(tmp_path / "saved")
    assert_right(model, reference)


def test_weights_that_were_cast_on_their_way_to_the_disk(reference: nn.Module, source: Path, tmp_path: Path) -> None:
    with overspill.empty_weights():
        model = like(reference)()
    overspill.load(model, source, max_memory={}, dtype=torch.float16, progress=False, offload_folder=tmp_path / "own")
    save(model, tmp_path / "saved")
    expected = {n: t.half() if t.is_floating_point() else t for n, t in state_of(reference).items()}
    assert_saved(tmp_path / "saved", expected)


def test_a_part_of_a_model_is_saved_by_its_own_names(model: nn.Module, reference: nn.Module, tmp_path: Path) -> None:
    save(model.get_submodule("blocks"), tmp_path / "saved")
    assert_saved(tmp_path / "saved", state_of(reference.get_submodule("blocks")))


def test_a_model_without_tensors_is_an_empty_checkpoint(tmp_path: Path) -> None:
    save(nn.ReLU(), tmp_path / "saved")
    assert_saved(tmp_path / "saved", {})


def test_values_that_are_not_in_order_in_memory(tmp_path: Path) -> None:
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_buffer("turned", torch.randn(6, 4).t())
    model.register_buffer("part", torch.randn(10, 10)[2:5, ::3])
    expected = state_of(model)
    save(model, tmp_path / "saved")
    assert_saved(tmp_path / "saved", expected)
    overspill.offload(model, to="disk", min_bytes=0)
    save(model, tmp_path / "saved", max_shard_size=100)
    assert_saved(tmp_path / "saved", expected)


def test_a_tensor_larger_than_a_shard_gets_a_file_of_its_own_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(64, 64), nn.Linear(4, 4))
    save(model, tmp_path / "saved", max_shard_size=1000)
    assert_saved(tmp_path / "saved", state_of(model))
    assert "1.weight takes 16.00 KiB, more than max_shard_size (1000 B): it gets a file of its own" in caplog.text
    assert caplog.text.count("of its own") == 1
    index = open_checkpoint(tmp_path / "saved")
    shared = [name for name, tensor in index.items() if tensor.file == index["1.weight"].file]
    assert shared == ["1.weight"]


def test_numbers_that_are_negated_only_when_they_are_read(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
    model.register_buffer("negative", torch.randn(3, dtype=torch.complex64).conj().imag)
    save(model, tmp_path)
    found = read(tmp_path)
    assert all(torch.equal(found[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.parametrize(
    ("values", "kind"),
    [(torch.zeros(3, dtype=torch.complex128), "complex128"), (torch.eye(3).to_sparse(), "sparse_coo")],
)
def test_what_the_format_cannot_hold_is_refused_by_name(
    values: torch.Tensor, kind: str, reference: nn.Module, source: Path
) -> None:
    before = state_of(reference)
    reference.register_buffer("odd", values)
    with pytest.raises(SaveError, match=f"odd is {kind}, which safetensors files cannot hold"):
        save(reference, source)
    assert_saved(source, before)


def test_metadata_is_in_every_file(model: nn.Module, tmp_path: Path) -> None:
    save(model, tmp_path / "saved", max_shard_size=TINY, metadata={"who": "me", "größe": "7"})
    shards = list((tmp_path / "saved").glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt", "who": "me", "größe": "7"}


# ---------------------------------------------------------------- names


def test_a_tie_keeps_the_name_that_it_was_stored_by(reference: nn.Module, tmp_path: Path) -> None:
    expected = state_of(reference, without=("embed.weight",))
    source = write_whole(expected, tmp_path / "source")
    for tier in ALL_TIERS:
        model = loaded(like(reference), source, tier)
        save(model, tmp_path / tier)
        assert_saved(tmp_path / tier, expected)
    overspill.offload(model, to="disk", modules=["embed"], min_bytes=0)
    save(model, tmp_path / "moved")
    assert_saved(tmp_path / "moved", expected)


@pytest.mark.parametrize("tier", ALL_TIERS)
def test_a_tie_that_was_cut_is_two_tensors(tier: str, reference: nn.Module, tmp_path: Path) -> None:
    source = write_whole(state_of(reference, without=("embed.weight",)), tmp_path / "source")
    model = loaded(like(reference), source, tier)
    for each in (model, reference):
        head: Any = each.get_submodule("head")
        head.weight = nn.Parameter(each.get_parameter("embed.weight").detach() + 1)
    save(model, tmp_path / "saved")
    assert_saved(tmp_path / "saved", state_of(reference, without=()))


@pytest.mark.parametrize("tier", ALL_TIERS)
def test_parameters_that_were_replaced_one_after_the_other(tier: str, reference: nn.Module, source: Path) -> None:
    model = loaded(like(reference), source, tier)
    for each in (model, reference):
        for path, module in each.named_modules():
            if path.endswith(("up", "down")):  # a new one may get the id of the one that went before
                module.weight = nn.Parameter(module.get_parameter("weight").detach() * 2)
    save(model, source)
    assert_saved(source, state_of(reference))
    assert torch.equal(run(model), run(reference))  # though the units still bring what was replaced
    save(model, source, max_shard_size=TINY)
    assert_saved(source, state_of(reference))


def test_a_shard_of_which_all_was_replaced_is_not_missed(reference: nn.Module, tmp_path: Path) -> None:
    source = write_shards(state_of(reference), tmp_path / "source", count=len(state_of(reference)))
    model = loaded(like(reference), source, "disk")
    forget_open_files(model)
    for each in (model, reference):
        layer: Any = each.get_submodule("blocks.1.up")
        layer.weight = nn.Parameter(layer.weight.detach().clone() * 2)
    forget_open_files(model)
    save(model, source)
    assert_saved(source, state_of(reference))
    assert torch.equal(run(model), run(reference))


# ---------------------------------------------------------------- how bytes get there


class RangeCopies:
    """Counts what is copied inside the kernel, and can refuse to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        self.refuse_with: int | None = None
        self.at_once = 1 << 40
        self._copy = os.copy_file_range
        monkeypatch.setattr(os, "copy_file_range", self.copy)

    def copy(self, source: int, target: int, count: int, offset: int) -> int:
        if self.refuse_with is not None:
            raise OSError(self.refuse_with, os.strerror(self.refuse_with))
        done = self._copy(source, target, min(count, self.at_once), offset)
        self.nbytes += done
        return done


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> RangeCopies:
    return RangeCopies(monkeypatch)


def bytes_on_disk(model: nn.Module) -> int:
    return sum(home.nbytes for home in disk_homes(model) if home._overspill_values.memory is None)


def test_what_lies_unchanged_on_disk_is_copied_inside_the_kernel(
    model: nn.Module, reference: nn.Module, copies: RangeCopies, moved: Counter[str], tmp_path: Path
) -> None:
    total = bytes_on_disk(model)
    save(model, tmp_path / "saved", max_shard_size=TINY)
    assert copies.nbytes == total > 0
    assert moved["disk"] == 0
    changed = reference.get_parameter("blocks.0.up.weight")
    for each in (model, reference):
        with torch.no_grad():
            each.get_parameter("blocks.0.up.weight").zero_()
    copies.nbytes = 0
    save(model, tmp_path / "saved", max_shard_size=TINY)
    assert copies.nbytes == total - changed.nbytes
    assert_saved(tmp_path / "saved", state_of(reference))


def test_copies_that_end_early_go_on(
    model: nn.Module, reference: nn.Module, copies: RangeCopies, tmp_path: Path
) -> None:
    copies.at_once = 1000
    save(model, tmp_path / "saved")
    assert_saved(tmp_path / "saved", state_of(reference))


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_where_the_kernel_copies_no_ranges_the_bytes_are_the_same(
    reason: int, model: nn.Module, reference: nn.Module, copies: RangeCopies, tmp_path: Path
) -> None:
    copies.refuse_with = reason
    save(model, tmp_path / "saved", max_shard_size=TINY)
    assert copies.nbytes == 0
    assert_saved(tmp_path / "saved", state_of(reference))


def test_a_source_whose_bytes_cannot_be_read_is_an_error(
    model: nn.Module, reference: nn.Module, source: Path, copies: RangeCopies
) -> None:
    copies.refuse_with = errno.EIO
    with pytest.raises(OverspillError):
        save(model, source)
    copies.refuse_with = None
    assert_saved(source, state_of(reference))
    save(model, source)
    assert_right(model, reference)


MEMORY = """
    import errno, json, os, sys, threading
    from pathlib import Path

    import torch
    from torch import nn

    import overspill

    from memory_watch import Watch

    with overspill.empty_weights():
        model = nn.Sequential(nn.Embedding(25_000, 1024), *(nn.Linear(2048, 2048) for _ in range(12)))
    folder = Path({folder!r})
    overspill.load(model, folder, max_memory={{}}, progress=False)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with Watch() as kernel:
        overspill.save(model, folder / "first", progress=False)
    def refuse(*arguments):
        raise OSError(errno.EXDEV, "another file system")
    os.copy_file_range = refuse
    model[1].weight.data[0] = 1
    with Watch() as process:
        overspill.save(model, folder / "first", max_shard_size="120MB", progress=False)
    print(json.dumps([size, kernel.growth, process.growth]))
"""


def test_three_hundred_megabytes_are_saved_in_a_few(tmp_path: Path) -> None:
    layers = {f"{n}.{kind}": torch.zeros(shape) for n in range(1, 13) for kind, shape in LINEAR.items()}
    save_file({"0.weight": torch.randn(25_000, 1024), **layers}, tmp_path / WHOLE)
    del layers
    size, *growths = json.loads(run_program(MEMORY.format(folder=str(tmp_path))))
    shutil.rmtree(tmp_path)
    assert size > 300_000_000
    assert max(growths) < 60_000_000, growths


LINEAR = {"weight": (2048, 2048), "bias": (2048,)}


# ---------------------------------------------------------------- over its own source


def test_disk_homes_refer_to_the_new_files_once_the_old_ones_are_gone(
    model: nn.Module, reference: nn.Module, source: Path, moved: Counter[str]
) -> None:
    run(model)
    old = {span.file for home in disk_homes(model) for span in home._overspill_values.spans}
    save(model, source, max_shard_size=TINY)
    new = {span.file for home in disk_homes(model) for span in home._overspill_values.spans}
    assert not old & new
    assert {file.path for file in new} <= set(source.glob("model-*.safetensors"))
    moved.clear()
    assert_right(model, reference)
    assert moved["disk"] > 0


def test_disk_homes_keep_their_files_where_those_stay(model: nn.Module, source: Path, tmp_path: Path) -> None:
    spans = [home._overspill_values.spans for home in disk_homes(model)]
    save(model, tmp_path / "saved", max_shard_size=TINY)
    assert [home._overspill_values.spans for home in disk_homes(model)] == spans
    assert {span.file.path for spans_ in spans for span in spans_} == {source / WHOLE}


def test_a_save_over_itself_again_and_again(model: nn.Module, reference: nn.Module, source: Path) -> None:
    generator = random.Random(0)
    for _ in range(6):
        for each in (model, reference):
            with torch.no_grad():
                each.get_parameter("blocks.1.down.weight").add_(1)
        save(model, source, max_shard_size=generator.choice([1, TINY, 3 * TINY, "1GB"]))
        assert_saved(source, state_of(reference))
        assert_right(model, reference)


def test_a_source_that_is_a_link_to_a_store_is_replaced_and_the_store_is_not(
    reference: nn.Module, source: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / WHOLE).symlink_to(source / WHOLE)  # as the hub's cache has it
    model = loaded(like(reference), snapshot, "disk")
    edited_in_place(model)
    before = state_of(reference)
    edited_in_place(reference)
    save(model, snapshot)
    assert_saved(snapshot, state_of(reference))
    assert_saved(source, before)
    assert_right(model, reference)


# ---------------------------------------------------------------- killed at any point

CRASHES = """
    import gc, io, json, os, shutil
    from pathlib import Path

    import torch

    import overspill
    import test_save as t
    from overspill.checkpoint import open_checkpoint, writer
    from overspill.errors import CheckpointError
    from support import came_to_its_end, die, in_child, loaded

    class Killer:
        # Stands before each step that changes files; the last one is done by half, where that can be.
        def __init__(self, after):
            self.left = after

        def die_now(self):
            self.left -= 1
            return self.left < 0

        def install(self):
            for name in ("replace", "rename", "link", "unlink", "fsync", "mkdir", "chmod"):
                setattr(os, name, self.before(getattr(os, name)))
            killer = self

            class File(io.FileIO):
                writes = 0

                def write(self, data):
                    self.writes += 1
                    if self.writes <= 2 and killer.die_now():  # the header, a tensor
                        super().write(data[: len(data) // 2])
                        die()
                    return super().write(data)

            writer.FileIO = File

        def before(self, step):
            def call(*arguments, **options):
                if self.die_now():
                    die()
                return step(*arguments, **options)
            return call

    def same(found, expected):
        try:
            t.assert_same(found, expected)
        except AssertionError:
            return False
        return True

    def ours(folder):
        index = open_checkpoint(folder)
        content = {{file: t.read_file(file.path) for file in index.files}}
        return {{name: content[stored.file][name] for name, stored in index.items()}}

    def kill_at_each_step(root, kind, old_kind):
        template = t.WRITE[old_kind or "one"](old, root / f"{{kind}} {{old_kind}}")
        (template / "config.json").write_text("mine")
        folder = root / "folder"
        size, next_size = (2 * t.TINY, "1GB") if kind == "shards" else ("1GB", 2 * t.TINY)
        found, kills = [], 0

        def save_and_die():
            model = loaded(build, folder if old_kind else template, "disk")
            with torch.no_grad():
                model.blocks[0].up.weight.add_(1)
            Killer(kills).install()
            overspill.save(model, folder, max_shard_size=size, progress=False)

        while True:
            shutil.rmtree(folder, ignore_errors=True)
            if old_kind:
                shutil.copytree(template, folder)
            saved = came_to_its_end(in_child(save_and_die), f"killed at step {{kills}}")
            kind_written = "one" if (folder / t.WHOLE).exists() else "shards"
            if old_kind or saved:
                theirs, our_own = t.read(folder), ours(folder)
                for state in (theirs, our_own):
                    assert same(state, old) or same(state, new), (kills, t.files_in(folder))
                found.append([same(theirs, new), same(our_own, new)])
            elif folder.exists():
                check_no_checkpoint_or_all(folder)
            overspill.save(reference, folder, max_shard_size=next_size, progress=False)
            t.assert_saved(folder, new, *(["config.json"] if old_kind else []))
            if saved:
                assert kind == kind_written
                return kills, found
            kills += 1

    def check_no_checkpoint_or_all(folder):
        try:
            state = ours(folder)
        except CheckpointError:
            return
        assert not state.keys() - new.keys()
        assert len(state) < len(new) or same(state, new)  # with some missing, a load refuses it

    torch.manual_seed(0)
    reference = t.aligned(t.Model(blocks=1)).eval()
    build = lambda: t.Model(blocks=1)
    old = t.state_of(reference)
    with torch.no_grad():
        reference.blocks[0].up.weight.add_(1)
    new = t.state_of(reference)
    gc.freeze()  # children share these pages
    root = Path({root!r})
    print(json.dumps({{case: kill_at_each_step(root, *case.split(",")) for case in {cases!r}}}))
"""
KILLED = {
    "one over one": "one,one",
    "shards over one": "shards,one",
    "one over shards": "one,shards",
    "shards over shards": "shards,shards",
    "new one": "one,",
    "new shards": "shards,",
}


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[list[bool]]]]:
    """How often each kind of save was killed, and whether Transformers and we found the new checkpoint behind it."""
    program = CRASHES.format(root=str(tmp_path_factory.mktemp("killed")), cases=list(KILLED.values()))
    result: dict[str, tuple[int, list[list[bool]]]] = json.loads(run_program(program))
    return result


@pytest.mark.parametrize("case", KILLED)
def test_a_kill_at_any_step_leaves_the_old_or_the_new_checkpoint_whole(
    case: str, kills: dict[str, tuple[int, list[list[bool]]]]
) -> None:
    count, found = kills[KILLED[case]]
    assert count >= 8  # each step of the save
    assert found[-1] == [True, True]
    if "over" in case:
        assert found[0] == [False, False]
        for reader in zip(*found, strict=True):
            assert list(reader) == sorted(reader), "once it is the new one, it stays"


def test_the_kills_were_many(kills: dict[str, tuple[int, list[list[bool]]]]) -> None:
    print({case: count for case, (count, _) in kills.items()})  # noqa: T201
    assert sum(count for count, _ in kills.values()) >= 100


# ---------------------------------------------------------------- what cannot be


def assert_as_before(model: nn.Module, reference: nn.Module, source: Path, *others: str) -> None:
    """After a failed save over the source: the old checkpoint is whole, the model runs, and a later save works."""
    assert_saved(source, state_of(reference), *others)
    assert torch.equal(run(model), run(reference))
    edited_in_place(model)
    edited_in_place(reference)
    save(model, source, max_shard_size=TINY)
    assert_saved(source, state_of(reference), *others)
    assert_right(model, reference)


@pytest.mark.parametrize("max_shard_size", ["1GB", TINY])
@pytest.mark.parametrize("step", range(0, 40, 3))
def test_a_disk_that_is_full_in_the_middle(
    step: int, max_shard_size: int | str, model: nn.Module, reference: nn.Module, source: Path, copies: RangeCopies,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    copies.refuse_with = errno.EXDEV  # so that each byte is written by the process
    writes = itertools.count()

    class Full(FileIO):
        def write(self, data: Any) -> int:
            if next(writes) >= step:
                super().write(memoryview(data)[:10])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "FileIO", Full)
        with pytest.raises(SaveError, match=r"writing .*No space left on device.*whole") as raised:
            save(model, source, max_shard_size=max_shard_size)
    assert str(source) in str(raised.value)
    assert files_in(source) == {WHOLE}
    assert_as_before(model, reference, source)


@pytest.mark.parametrize("call", ["copy_file_range", "fsync", "replace", "open"])
@pytest.mark.parametrize("max_shard_size", ["1GB", TINY])
def test_a_call_that_fails_before_the_new_checkpoint_stands(
    call: str, max_shard_size: int | str, model: nn.Module, reference: nn.Module, source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real = getattr(os, call)

    def fail(*arguments: Any, **options: Any) -> Any:
        if call == "open" and not str(arguments[0]).endswith(".safetensors"):
            return real(*arguments, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run(model)  # the source is open
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(SaveError, match="No space left on device"):
            save(model, source, max_shard_size=max_shard_size)
    assert files_in(source) == {WHOLE}
    assert_as_before(model, reference, source)


def test_no_space_is_noticed_before_the_first_byte(
    model: nn.Module, reference: nn.Module, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(source)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        patch.setattr(writer, "new_file", lambda path, mode: pytest.fail("a file was opened"))
        with pytest.raises(SaveError, match=r"needs .* where 1000 B are free"):
            save(model, source)
    assert_as_before(model, reference, source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(model: nn.Module, reference: nn.Module, source: Path) -> None:
    source.chmod(0o500)
    try:
        with pytest.raises(SaveError, match="Permission denied"):
            save(model, source)
    finally:
        source.chmod(0o700)
    assert_as_before(model, reference, source)


def test_a_target_that_is_a_file(model: nn.Module, reference: nn.Module, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", source / WHOLE, tmp_path / "file" / "below", Path("/dev/null")):
        with pytest.raises(SaveError, match=target.name):
            save(model, target)
    assert (tmp_path / "file").read_text() == "mine"
    assert_as_before(model, reference, source)


def test_a_folder_with_other_things_in_it_is_left_alone(model: nn.Module, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("mine")
    with pytest.raises(SaveError, match=r"chapter\.tex and no checkpoint"):
        save(model, folder)
    assert files_in(folder) == {"chapter.tex"}


@pytest.mark.parametrize("max_shard_size", ["1GB", TINY])
def test_what_others_keep_beside_a_checkpoint_survives(
    max_shard_size: int | str, reference: nn.Module, tmp_path: Path
) -> None:
    others = {"config.json", "tokenizer.json", "optimizer.pt", "pytorch_model.bin", "notes.txt", "adapter.safetensors"}
    folder = write_shards(state_of(reference), tmp_path / "checkpoint")
    model = loaded(like(reference), folder, "disk")
    for name in others:
        (folder / name).write_text(name)
    (folder / "runs").mkdir()
    save(model, folder, max_shard_size=max_shard_size)
    for name in others:
        assert (folder / name).read_text() == name
    (folder / "adapter.safetensors").unlink()
    assert_saved(folder, state_of(reference), *others, "runs")


@pytest.mark.parametrize("change", ["written to", "replaced", "cut short", "gone"])
def test_a_source_that_changed_since_it_was_loaded(change: str, model: nn.Module, source: Path, tmp_path: Path) -> None:
    path = source / WHOLE
    raw = bytearray(path.read_bytes())
    forget_open_files(model)
    if change == "written to":
        raw[-1] ^= 1
        path.write_bytes(raw)
        os.utime(path, ns=(0, 0))  # clocks of file systems are coarse
    elif change == "replaced":
        (tmp_path / "other").write_bytes(raw)
        (tmp_path / "other").replace(path)
    elif change == "cut short":
        path.write_bytes(raw[:-8])
    else:
        path.unlink()
    left = path.read_bytes() if path.exists() else None
    for target in (source, tmp_path / "new"):
        expected = CheckpointReadError if change == "gone" else CheckpointChangedError
        with pytest.raises(expected, match=str(path)):
            save(model, target)
    assert (path.read_bytes() if path.exists() else None) == left
    assert files_in(source) <= {WHOLE}
    assert files_in(tmp_path / "new") == set()


def test_a_source_that_changes_while_it_is_copied(
    model: nn.Module, source: Path, tmp_path: Path, copies: RangeCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = bytes_on_disk(model)

    def touch_behind_the_last(*arguments: Any) -> int:
        done = copies.copy(*arguments)
        if copies.nbytes == total:
            os.utime(source / WHOLE, ns=(1, 1))
        return done

    monkeypatch.setattr(os, "copy_file_range", touch_behind_the_last)
    with pytest.raises(CheckpointChangedError, match=WHOLE):
        save(model, tmp_path / "new")
    assert files_in(tmp_path / "new") == set()


def test_a_source_that_is_gone_but_still_open_is_saved(
    model: nn.Module, reference: nn.Module, source: Path, tmp_path: Path
) -> None:
    run(model)
    (source / WHOLE).unlink()
    save(model, tmp_path / "rescued")
    assert_saved(tmp_path / "rescued", state_of(reference))
    assert_right(model, reference)


@pytest.mark.parametrize("max_shard_size", ["1GB", 6 * TINY])
def test_an_interrupt_at_any_step(max_shard_size: int | str, reference: nn.Module, tmp_path: Path) -> None:
    """Not a kill: what was written aside is removed, unless it is the checkpoint by then."""
    for step in itertools.count():
        source = write_shards(state_of(reference), tmp_path / str(step))
        model = loaded(like(reference), source, "disk")
        twin = copy.deepcopy(reference)
        edited_in_place(model)
        edited_in_place(twin)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_after_step(patch, step)
            try:
                save(model, source, max_shard_size=max_shard_size)
            except KeyboardInterrupt:
                interrupted = True
            else:
                interrupted = False
        found = read(source)
        changed = torch.equal(found["embed.weight"], twin.get_parameter("embed.weight"))
        assert_same(found, state_of(twin if changed else reference))
        assert torch.equal(run(model), run(twin))
        save(model, source, max_shard_size=max_shard_size)
        assert_saved(source, state_of(twin))
        assert (source / WHOLE).exists() == (max_shard_size == "1GB")
        assert_right(model, twin)
        if not interrupted:
            break
    assert step > 10


def interrupt_after_step(patch: pytest.MonkeyPatch, step: int) -> None:
    """KeyboardInterrupt right behind the given call of those that change files, as a signal would have it."""
    calls = itertools.count()

    def and_then(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            if next(calls) == step:
                raise KeyboardInterrupt
            return result

        return call

    for name in ("replace", "link", "unlink", "fsync"):
        patch.setattr(os, name, and_then(getattr(os, name)))


def test_old_files_that_cannot_be_removed_are_said_so_and_gone_next_time(
    model: nn.Module, reference: nn.Module, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        with pytest.raises(SaveError, match=r"clearing up.*The new checkpoint stands"):
            save(model, source, max_shard_size=TINY)
    assert_same(read(source), state_of(reference))
    assert torch.equal(run(model), run(reference))
    save(model, source, max_shard_size=TINY)
    assert_saved(source, state_of(reference))
    assert_right(model, reference)


def test_a_tensor_that_is_larger_than_a_shard_has_one_of_its_own(reference: nn.Module, tmp_path: Path) -> None:
    save(reference, tmp_path, max_shard_size=TINY)
    assert_saved(tmp_path, state_of(reference))
    sizes = [[tensor.nbytes for tensor in read_file(path).values()] for path in tmp_path.glob("*.safetensors")]
    assert any(sum(shard) > TINY for shard in sizes)
    assert all(len(shard) == 1 or sum(shard) <= TINY for shard in sizes)


def test_sizes_that_cannot_be_read_are_refused_before_anything_happens(model: nn.Module, tmp_path: Path) -> None:
    sizes: list[Any] = ["many", -1, "5 GBs", None, 1.5, True]
    for size in sizes:
        with pytest.raises(BudgetError, match="max_shard_size"):
            save(model, tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_a_skeleton_has_nothing_to_save(source: Path, reference: nn.Module, tmp_path: Path) -> None:
    with overspill.empty_weights():
        skeleton = Model()
    for target in (source, tmp_path / "new"):
        with pytest.raises(SaveError, match=r"embed\.weight is on the meta device"):
            save(skeleton, target)
    with pytest.raises(SaveError, match=r"embed\.weight"):
        overspill.state_dict(skeleton)
    assert_saved(source, state_of(reference))
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------- beside other threads


@contextlib.contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """While the block runs, another thread does `work` over and over."""
    ended, failures, begun = threading.Event(), list[BaseException](), threading.Event()

    def repeat() -> None:
        try:
            while not ended.is_set():
                work()
                begun.set()
        except BaseException as failure:
            failures.append(failure)
            begun.set()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        ended.set()
        thread.join(60)
    assert not thread.is_alive(), "deadlock"
    assert not failures, failures


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def statistics_of(state: Mapping[str, torch.Tensor]) -> State:
    return {name: tensor.clone() for name, tensor in state.items() if name.endswith(STATISTICS)}


@pytest.mark.parametrize("trained", [False, True], ids=["forwards", "training steps"])
@pytest.mark.parametrize("tier", ["cpu", "disk", "mixed"])
def test_all_statistics_of_a_save_belong_to_one_step(
    tier: str, trained: bool, reference: nn.Module, source: Path, tmp_path: Path
) -> None:
    model = loaded(like(reference), source, tier)

    def stepper(each: nn.Module) -> Callable[[], None]:
        each.train()
        optimizer = torch.optim.SGD((p for p in each.parameters() if p.numel()), lr=0.01)

        def step() -> None:
            if not trained:
                run(each)
                return
            each(IDS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    with beside(stepper(model)):
        for number in range(6):
            save(model, tmp_path / str(number), max_shard_size=[TINY, "1GB"][number % 2])

    count, twin_step = 0, stepper(reference)
    for number in range(6):
        found = read(tmp_path / str(number))
        (reached,) = {int(found[f"blocks.{n}.batch_norm.num_batches_tracked"]) for n in range(3)}
        assert reached >= max(count, 1)
        while count < reached:
            twin_step()
            count += 1
        expected = state_of(reference)
        assert_same(statistics_of(found), statistics_of(expected))
        if not trained:
            assert_same(found, expected)


def test_forwards_of_several_threads_go_on_beside_saves_over_the_source(
    model: nn.Module, reference: nn.Module, source: Path
) -> None:
    expected = run(reference)

    def forward() -> None:
        assert torch.equal(run(model), expected)

    with beside(forward), beside(forward):
        for size in (TINY, "1GB", 3 * TINY, TINY):
            save(model, source, max_shard_size=size)
            assert_saved(source, state_of(reference))
    assert_right(model, reference)


def test_saves_from_several_threads_to_their_own_folders(
    model: nn.Module, reference: nn.Module, tmp_path: Path
) -> None:
    threads = [threading.Thread(target=save, args=(model, tmp_path / name)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    for name in ("a", "b", "c"):
        assert_saved(tmp_path / name, state_of(reference))


@pytest.mark.parametrize("tier", [None, *ALL_TIERS])
def test_a_save_inside_a_forward_is_refused(
    tier: str | None, reference: nn.Module, source: Path, tmp_path: Path
) -> None:
    model = reference if tier is None else loaded(like(reference), source, tier)
    hook = model.get_submodule("blocks.1.norm").register_forward_hook(lambda *_: save(model, tmp_path / "new"))
    with pytest.raises(StateError, match="cannot save a model while a forward of it is running"):
        run(model)
    hook.remove()
    assert not (tmp_path / "new").exists()
    save(model, tmp_path / "new")
    assert_saved(tmp_path / "new", state_of(reference))


# ---------------------------------------------------------------- state_dict


def test_a_state_dict_reads_a_tensor_when_it_is_asked_for(
    model: nn.Module, reference: nn.Module, moved: Counter[str]
) -> None:
    state = overspill.state_dict(model)
    expected = state_of(reference)
    assert state.specs() == {name: TensorSpec.of(tensor) for name, tensor in expected.items()}
    assert set(state) == set(expected)
    assert len(state) == len(expected)
    assert "blocks.0.up.weight" in state
    assert "head.weight" not in state
    assert "blocks.0.scratch" not in state
    assert moved["disk"] == 0
    found = state["blocks.0.up.weight"]
    assert moved["disk"] == found.nbytes
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert_same(state, expected)
    with pytest.raises(KeyError):
        state["blocks.9.up.weight"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("tier", ALL_TIERS)
def test_a_state_dict_is_what_a_save_writes(
    tier: str, change: Callable[[nn.Module], None], reference: nn.Module, source: Path, tmp_path: Path
) -> None:
    model = loaded(like(reference), source, tier)
    change(model)
    save(model, tmp_path / "saved", max_shard_size=TINY)
    state = overspill.state_dict(model)
    assert_same(state, read(tmp_path / "saved"))
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    other = aligned(like(reference)())
    other.load_state_dict({**state, "head.weight": state["embed.weight"]})
    assert torch.equal(run(other.eval()), run(model))


def test_an_edit_after_the_state_dict_was_made_is_in_it(model: nn.Module, reference: nn.Module) -> None:
    state = overspill.state_dict(model)
    edited_in_place(model)
    edited_in_place(reference)
    assert_same(state, state_of(reference))


@pytest.mark.parametrize("shard_size", ["1GB", 20_000])
@pytest.mark.parametrize("step", ["_sync", "_remove_old", "_use_usual_names"])
def test_a_model_whose_save_over_its_source_could_not_clear_up_goes_on_with_the_new_files(
    step: str, shard_size: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = aligned(Net()).eval()
    save_checkpoint(twin, tmp_path)
    model = loaded(Net, tmp_path, "disk")
    with torch.no_grad():
        for net in (model, twin):
            net.get_parameter("embed.weight").mul_(0.5)
    clear_up = _Publication.clear_up

    def failing(self: _Publication) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(_Publication, step, full)
            clear_up(self)

    def full(self: _Publication) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(_Publication, "clear_up", failing)
        if step == "_use_usual_names" and shard_size == "1GB":
            overspill.save(model, tmp_path, max_shard_size=shard_size, progress=False)  # has none
        else:
            with pytest.raises(SaveError, match="The new checkpoint stands; save again to clear up"):
                overspill.save(model, tmp_path, max_shard_size=shard_size, progress=False)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(ids), twin(ids))
    overspill.save(model, tmp_path, progress=False)
    assert not [path.name for path in tmp_path.iterdir() if "overspill" in path.name]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["embed.weight"], twin.get_parameter("embed.weight"))


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("shard_size", ["1GB", 20_000])
def test_a_model_whose_save_is_interrupted_at_the_step_that_counts_refers_to_what_stands(
    shard_size: int | str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(aligned(Net()).eval(), tmp_path)
    model = loaded(Net, tmp_path, "disk")
    overspill.save(model, tmp_path, max_shard_size=shard_size, progress=False)
    put_in_place = _Publication.put_in_place

    def interrupted(self: _Publication) -> None:
        if when == "behind":
            put_in_place(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Publication, "put_in_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        overspill.save(model, tmp_path, max_shard_size=shard_size, progress=False)
    referred = {file for unit in streamed_units(model) for file in unit.store.files()}
    assert referred == {SourceFile.at(file.path) for file in referred}
