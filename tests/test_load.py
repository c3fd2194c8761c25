"""The verb load: every form of checkpoint to every tier, and a model that is left as it was when something is amiss."""

import errno
import gc
import io
import itertools
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import overspill
from overspill import loading, managed
from overspill.checkpoint.reader import FileReader
from overspill.errors import CheckpointMismatchError, PlanError, StateError
from support import TIERS, Block, Net, aligned, placed, run_program, save_checkpoint, streamed_units

IDS = torch.arange(24).view(2, 12)
ALL_TIERS = [*TIERS, "device"]

Build = Callable[[], nn.Module]
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without oneDNN: some virtual machines promise AMX, and its bfloat16 kernels die there (illegal instruction)."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture(params=ALL_TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reference() -> Net:
    return aligned(Net()).eval()  # type: ignore[return-value]


@pytest.fixture
def checkpoint(reference: Net, tmp_path: Path) -> Path:
    return save_checkpoint(reference, tmp_path / "checkpoint")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offset of each read of values since the test began."""
    offsets: list[int] = []
    for name in ("read", "read_aligned"):
        original = getattr(FileReader, name)

        def noting(self: FileReader, file: Any, offset: int, *rest: Any, original: Any = original) -> Any:
            offsets.append(offset)
            return original(self, file, offset, *rest)

        monkeypatch.setattr(FileReader, name, noting)
    return offsets


def skeleton(build: Build, *, include_buffers: bool = False) -> nn.Module:
    with overspill.empty_weights(include_buffers=include_buffers):
        return build().eval()


def load_on(
    tier: str,
    model: nn.Module,
    checkpoint: Path,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    offload_folder: Path | None = None,
) -> nn.Module:
    """`model`, loaded with its units on `tier`."""
    plan = placed(overspill.plan(model, {}, device="cpu", dtype=dtype), tier)
    return overspill.load(model, checkpoint, plan, strict=strict, offload_folder=offload_folder, progress=False)


def state_of(model: nn.Module) -> State:
    """Every persistent tensor of the model under each of its names, in memory of its own."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def save_state(state: Mapping[str, torch.Tensor], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(state), path)
    return path


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


def assert_same_state(model: nn.Module, reference: nn.Module) -> None:
    """The same values, shapes and dtypes, buffers that no checkpoint stores included."""
    ours = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    theirs = dict(itertools.chain(reference.named_parameters(), reference.named_buffers()))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(bits(ours[name]), bits(tensor)), name


def assert_same(model: nn.Module, reference: nn.Module, *args: Any) -> None:
    """The same state and, in two passes, the same outputs."""
    assert_same_state(model, reference)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(*args), reference(*args), rtol=0, atol=0)


def assert_untouched(model: nn.Module) -> None:
    """Still a skeleton, and nothing that a load could have hung on it."""
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert managed.managed(model) is None
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def units_by_name(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The roots of each unit of a managed model."""
    manager = managed.managed(model)
    assert manager is not None
    return {placement.unit.name: placement.unit.roots for placement in manager.plan.placements}


# ---------------------------------------------------------------- forms of a checkpoint


def _shards(state: State, folder: Path, save: Callable[[State, Path], object], suffix: str) -> Path:
    """Three shards with tensors dealt out in turn, so that no unit lies in one of them; the index's path."""
    folder.mkdir()
    weight_map = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003{suffix}"
        part = dict(list(state.items())[number::3])
        save(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    stem = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
    index = folder / f"{stem}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


FORMS: dict[str, Callable[[State, Path], Path]] = {
    "safetensors file": lambda state, folder: save_state(state, folder / "any-name.safetensors"),
    "folder": lambda state, folder: save_state(state, folder / "model.safetensors").parent,
    "sharded folder": lambda state, folder: _shards(state, folder, save_file, ".safetensors").parent,
    "index.json": lambda state, folder: _shards(state, folder, save_file, ".safetensors"),
    "sharded bin": lambda state, folder: _shards(state, folder, torch.save, ".bin").parent,
    "bin": lambda state, folder: _pickled(state, folder / "pytorch_model.bin"),
    "pt": lambda state, folder: _pickled({"state_dict": state, "epoch": 3}, folder / "last.pt"),
}


def _pickled(content: object, path: Path) -> Path:
    path.parent.mkdir()
    torch.save(content, path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_checkpoint_loads_to_every_tier(form: str, tier: str, reference: Net, tmp_path: Path) -> None:
    path = FORMS[form](state_of(reference), tmp_path / "checkpoint")
    assert_same(load_on(tier, skeleton(Net), path), reference, IDS)


def test_a_path_may_be_a_string_and_the_model_itself_is_returned(checkpoint: Path, reference: Net) -> None:
    model = skeleton(Net)
    assert overspill.load(model, str(checkpoint), max_memory={}, progress=False) is model
    assert_same(model, reference, IDS)


@pytest.mark.parametrize("stored", [["embed.weight", "head.weight"], ["embed.weight"], ["head.weight"]])
def test_a_tie_loads_from_any_of_its_names(stored: list[str], tier: str, reference: Net, tmp_path: Path) -> None:
    state = state_of(reference)
    for name in {"embed.weight", "head.weight"} - set(stored):
        del state[name]
    model = load_on(tier, skeleton(Net), save_state(state, tmp_path / "model.safetensors"))
    assert model.head.weight is model.embed.weight  # type: ignore[union-attr]
    assert_same(model, reference, IDS)


def test_a_pickle_in_which_ties_share_their_memory_loads(tier: str, reference: Net, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(reference.state_dict(), path)
    model = load_on(tier, skeleton(Net), path)
    assert model.head.weight is model.embed.weight  # type: ignore[union-attr]
    assert_same(model, reference, IDS)


def test_what_goes_to_disk_is_not_read(checkpoint: Path, reference: Net, reads: list[int]) -> None:
    model = load_on("disk", skeleton(Net), checkpoint)
    on_disk = {id(home) for unit in streamed_units(model) for home in unit.store.homes}
    resident = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in on_disk]
    assert len(reads) <= len(resident)
    assert len(on_disk) > len(resident)


# ---------------------------------------------------------------- dtypes

CASTS = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16),
]


@pytest.mark.parametrize(("stored", "dtype"), CASTS)
def test_a_cast_gives_the_bits_of_the_resident_models_cast(
    stored: torch.dtype, dtype: torch.dtype, tier: str, reference: Net, tmp_path: Path
) -> None:
    checkpoint = save_checkpoint(reference.to(stored), tmp_path / "checkpoint")
    model = load_on(tier, skeleton(Net), checkpoint, dtype=dtype, offload_folder=tmp_path / "offload")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert_same(model, aligned(reference.to(dtype)), IDS)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float64])
def test_without_a_dtype_each_tensor_gets_the_models_own(
    stored: torch.dtype, tier: str, reference: Net, tmp_path: Path
) -> None:
    checkpoint = save_checkpoint(reference.to(stored), tmp_path / "checkpoint")
    model = load_on(tier, skeleton(Net), checkpoint, offload_folder=tmp_path / "offload")
    assert model.blocks[0].scale.dtype == torch.float64  # type: ignore[union-attr, index]
    expected = aligned(Net()).eval()
    expected.load_state_dict(reference.state_dict())
    assert_same(model, expected, IDS)


def test_integers_and_bools_keep_their_dtype_when_the_rest_is_cast(tier: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(_Odd() for _ in range(3)))

    reference = build()
    model = load_on(tier, skeleton(build), save_checkpoint(reference, tmp_path), dtype=torch.float64)
    kept = (torch.int8, torch.bool, torch.int64, torch.complex64)
    for name, tensor in reference.state_dict().items():
        ours = model.state_dict()[name]
        assert ours.dtype == (tensor.dtype if tensor.dtype in kept else torch.float64), name
        assert torch.equal(bits(ours), bits(tensor.to(ours.dtype))), name


def test_a_dtype_that_weights_cannot_have_is_refused(checkpoint: Path) -> None:
    # Rounding every weight to an integer is what nn.Module.to refuses too.
    model = skeleton(Net)
    with pytest.raises(overspill.errors.OverspillError, match="int8"):
        overspill.load(model, checkpoint, max_memory={}, dtype=torch.int8, progress=False)
    assert_untouched(model)


# ---------------------------------------------------------------- the offload folder


@pytest.fixture
def offload(tmp_path: Path) -> Path:
    """A folder with files of the user's own, two of which look like ours."""
    folder = tmp_path / "offload"
    (folder / "overspill-mine").mkdir(parents=True)
    (folder / "overspill-mine" / "0.bin").write_bytes(b"precious")
    (folder / "notes.txt").write_text("mine")
    (folder / "overspill.json").write_text("{}")
    return folder


def content(folder: Path) -> dict[str, bytes | None]:
    """Everything below `folder`, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def test_a_converted_copy_lies_in_a_fresh_marked_private_folder_and_goes_with_the_model(
    checkpoint: Path, offload: Path, reference: Net
) -> None:
    before = content(offload)
    old_umask = os.umask(0)
    try:
        model = load_on("disk", skeleton(Net), checkpoint, dtype=torch.bfloat16, offload_folder=offload)
    finally:
        os.umask(old_umask)
    (ours,) = (path for path in offload.iterdir() if path.name not in before)
    assert json.loads((ours / "overspill.json").read_text())["made by"] == "overspill"
    for path in (ours, *ours.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"others may read {path}"
    converted = sum(path.stat().st_size for path in ours.iterdir() if path.name != "overspill.json")
    changed = [s for unit in streamed_units(model) for s in unit.store.layout.specs if s.dtype == torch.bfloat16]
    assert sum(s.nbytes for s in changed) <= converted <= sum(s.nbytes + 4096 for s in changed)
    assert {name: data for name, data in content(offload).items() if name in before} == before

    assert_same(model, aligned(reference.to(torch.bfloat16)), IDS)
    del model
    gc.collect()
    assert content(offload) == before


def test_what_someone_else_puts_into_our_folder_is_not_deleted(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    model = load_on("disk", skeleton(Net), checkpoint, dtype=torch.bfloat16, offload_folder=folder)
    (ours,) = folder.iterdir()
    (ours / "notes.txt").write_text("mine")
    del model
    gc.collect()
    assert content(folder) == {ours.name: None, f"{ours.name}/notes.txt": b"mine"}


def test_two_models_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    references = [aligned(Net()).eval() for _ in range(2)]
    paths = [save_checkpoint(reference, tmp_path / str(number)) for number, reference in enumerate(references)]
    models = [
        load_on("disk", skeleton(Net), path, dtype=torch.bfloat16, offload_folder=folder) for path in (*paths, paths[0])
    ]
    assert len(list(folder.iterdir())) == 3
    first, second = (reference.to(torch.bfloat16) for reference in references)
    for model, expected in zip(models, (first, second, first), strict=True):
        assert_same(model, aligned(expected), IDS)
    del model, models[0]
    gc.collect()
    assert len(list(folder.iterdir())) == 2
    for model, expected in zip(models, (second, first), strict=True):
        assert_same(model, aligned(expected), IDS)


@pytest.mark.parametrize("cast_on", ["no tier", "cpu", "device"])
def test_an_offload_folder_is_not_even_made_when_nothing_on_disk_changes(
    cast_on: str, checkpoint: Path, reference: Net, tmp_path: Path
) -> None:
    folder = tmp_path / "offload"
    tier, dtype = ("disk", None) if cast_on == "no tier" else (cast_on, torch.bfloat16)
    files = set(tmp_path.rglob("*"))
    model = load_on(tier, skeleton(Net), checkpoint, dtype=dtype, offload_folder=folder)
    assert_same(model, aligned(reference if dtype is None else reference.to(dtype)), IDS)
    assert not folder.exists()
    assert set(tmp_path.rglob("*")) == files


def test_without_an_offload_folder_the_systems_temporary_one_is_used(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    model = load_on("disk", skeleton(Net), checkpoint, dtype=torch.bfloat16)
    (ours,) = (tmp_path / "tmp").iterdir()
    assert ours.name.startswith("overspill-")
    del model
    gc.collect()
    assert content(tmp_path / "tmp") == {}


def test_a_converted_model_of_many_tensors_needs_few_descriptors(tmp_path: Path) -> None:
    # Mixtures of experts have tens of thousands of tensors, and a process has 1,024 descriptors by default.
    program = f"""
        import resource, torch, overspill
        from pathlib import Path
        from support import save_checkpoint
        from torch import nn

        def build():
            return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(40)))

        reference, x = build(), torch.ones(1, 8, dtype=torch.float64)
        folder = Path({str(tmp_path)!r})
        checkpoint = save_checkpoint(reference, folder / "checkpoint")
        with overspill.empty_weights():
            model = build()
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        overspill.load(
            model, checkpoint, max_memory={{}}, dtype=torch.float64, offload_folder=folder / "offload", progress=False
        )
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference.double()(x))
    """
    run_program(program)


def test_a_forked_child_that_ends_leaves_its_parents_folder_alone(checkpoint: Path, tmp_path: Path) -> None:
    program = f"""
        import os, sys, torch, overspill
        from pathlib import Path
        from support import Net

        with overspill.empty_weights():
            model = Net().eval()
        folder = Path({str(tmp_path / "offload")!r})
        overspill.load(
            model, {str(checkpoint)!r}, max_memory={{}}, dtype=torch.float64, offload_folder=folder, progress=False
        )
        child = os.fork()
        if child == 0:
            sys.exit(0)  # with all that Python does at its end
        os.waitpid(child, 0)
        assert list(folder.iterdir()), "the child removed it"
        with torch.no_grad():
            model(torch.arange(4))
    """
    run_program(program)
    assert content(tmp_path / "offload") == {}, "the parent's own end removes it"


# ---------------------------------------------------------------- what does not fit


def _misfit(state: State) -> State:
    """One missing, one unexpected, one of another shape, one of another kind."""
    state = dict(state)
    del state["blocks.1.up.weight"]
    state["blocks.9.up.weight"] = torch.zeros(3)
    state["norm.weight"] = torch.zeros(31)
    state["blocks.0.shift"] = torch.zeros(32, dtype=torch.int32)
    return state


def test_all_that_does_not_fit_is_told_in_one_error_before_anything_is_read(
    tier: str, reference: Net, checkpoint: Path, tmp_path: Path, reads: list[int]
) -> None:
    wrong = save_state(_misfit(state_of(reference)), tmp_path / "wrong" / "model.safetensors")
    model = skeleton(Net)
    parameters = list(model.parameters())
    with pytest.raises(CheckpointMismatchError) as caught:
        load_on(tier, model, wrong, dtype=torch.bfloat16, offload_folder=tmp_path / "offload")
    message = str(caught.value)
    assert str(wrong.parent) in message
    for line in (
        r"1 missing from the checkpoint:\n  blocks\.1\.up\.weight\n",
        r"1 not in the model \(strict=False ignores these\):\n  blocks\.9\.up\.weight\n",
        r"norm\.weight: \[31\] in the checkpoint, \[32\] in the model",
        r"blocks\.0\.shift: torch\.int32 in the checkpoint, torch\.float32 in the model",
    ):
        assert re.search(line, message), message
    assert reads == []
    assert not (tmp_path / "offload").exists()
    assert_untouched(model)
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert_same(load_on(tier, model, checkpoint), reference, IDS)


def test_a_long_list_is_cut_and_counted(reference: Net, tmp_path: Path) -> None:
    state = {**state_of(reference), **{f"extra.{number}": torch.zeros(1) for number in range(30)}}
    path = save_state(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"30 not in the model[^…]*… and 10 more$"):
        overspill.load(skeleton(Net), path, max_memory={}, progress=False)


def test_a_tie_of_which_no_name_is_stored_is_missing(reference: Net, tmp_path: Path) -> None:
    state = state_of(reference)
    del state["embed.weight"], state["head.weight"]
    model = skeleton(Net)
    with pytest.raises(CheckpointMismatchError, match=r"1 missing from the checkpoint:\n  embed\.weight"):
        overspill.load(model, save_state(state, tmp_path / "model.safetensors"), max_memory={}, progress=False)
    assert_untouched(model)


def test_not_strict_ignores_what_the_model_has_no_place_for_and_says_so(
    tier: str, reference: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {**state_of(reference), "extra": torch.zeros(3)}
    path = save_state(state, tmp_path / "model.safetensors")
    assert_same(load_on(tier, skeleton(Net), path, strict=False), reference, IDS)
    assert "1 tensors are not in the model, and ignored: extra" in caplog.text


def test_not_strict_keeps_the_values_of_what_is_not_stored_and_says_so(
    tier: str, reference: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, absent = aligned(Net()).eval(), ("blocks.0.up.weight", "blocks.1.down.weight", "blocks.2.shift", "norm.bias")
    state, own = state_of(reference), state_of(model)
    for name in absent:
        del state[name]
    path = save_state(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match="4 missing from the checkpoint"):
        load_on(tier, model, path)
    load_on(tier, model, path, strict=False)
    assert "4 tensors are not in the checkpoint, and as the model has them: blocks.0.up.weight" in caplog.text
    reference.load_state_dict({**state, **{name: own[name] for name in absent}})
    assert_same(model, reference, IDS)


def test_not_strict_still_refuses_a_parameter_that_would_have_no_values(
    tier: str, reference: Net, tmp_path: Path
) -> None:
    state = state_of(reference)
    del state["blocks.1.up.weight"]
    model = skeleton(Net)
    with pytest.raises(CheckpointMismatchError, match=r"1 missing from the checkpoint:\n  blocks\.1\.up\.weight$"):
        load_on(tier, model, save_state(state, tmp_path / "model.safetensors"), strict=False)
    assert_untouched(model)


def test_not_strict_still_refuses_another_shape(reference: Net, tmp_path: Path) -> None:
    state = {**state_of(reference), "norm.weight": torch.zeros(31)}
    model = skeleton(Net)
    with pytest.raises(CheckpointMismatchError, match=r"norm\.weight: \[31\] in the checkpoint"):
        load_on("disk", model, save_state(state, tmp_path / "model.safetensors"), strict=False)
    assert_untouched(model)


# ---------------------------------------------------------------- a wrong call


def test_loading_twice_is_refused(tier: str, checkpoint: Path, reference: Net) -> None:
    model = load_on(tier, skeleton(Net), checkpoint)
    with pytest.raises(StateError, match="already managed"):
        overspill.load(model, checkpoint, max_memory={}, progress=False)
    assert_same(model, reference, IDS)


def test_a_plan_beside_a_budget_is_refused(checkpoint: Path) -> None:
    model = skeleton(Net)
    plan = overspill.plan(model, {}, device="cpu")
    with pytest.raises(PlanError, match="max_memory has no effect beside a plan"):
        overspill.load(model, checkpoint, plan, max_memory={}, progress=False)
    assert_untouched(model)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Net(blocks=3), r"says nothing about blocks\.3\."),
        (lambda: Net(blocks=5), r"places blocks\.4\..*, which the model has not"),
        (lambda: Net(width=16), "another size or dtype"),
        (lambda: Net().double(), "another size or dtype"),
        (lambda: Net(tied=False), r"places head\.weight, which the model has not"),
    ],
)
def test_a_plan_for_another_model_is_refused(
    other: Build, message: str, checkpoint: Path, reads: list[int], reference: Net
) -> None:
    model = skeleton(Net)
    plan = overspill.plan(skeleton(other), {}, device="cpu")
    with pytest.raises(PlanError, match=message):
        overspill.load(model, checkpoint, plan, progress=False)
    assert reads == []
    assert_untouched(model)
    assert_same(load_on("disk", model, checkpoint), reference, IDS)


@pytest.mark.parametrize("planned", [None, torch.float16])
def test_another_dtype_than_the_plans_is_refused(planned: torch.dtype | None, checkpoint: Path) -> None:
    model = skeleton(Net)
    plan = overspill.plan(model, {}, device="cpu", dtype=planned)
    with pytest.raises(PlanError, match=f"made for dtype={planned}, not torch.bfloat16"):
        overspill.load(model, checkpoint, plan, dtype=torch.bfloat16, progress=False)
    assert_untouched(model)


def test_one_plan_serves_every_model_of_its_kind(checkpoint: Path, reference: Net) -> None:
    plan = overspill.plan(skeleton(Net), {}, device="cpu")
    models = [overspill.load(skeleton(Net), checkpoint, plan, progress=False) for _ in range(2)]
    for model in (*models, models[0]):
        assert_same(model, reference, IDS)


# ---------------------------------------------------------------- what a model is made of


def test_a_load_under_inference_mode_leaves_ordinary_tensors(tier: str, checkpoint: Path, reference: Net) -> None:
    model = skeleton(Net)
    with torch.inference_mode():
        load_on(tier, model, checkpoint)
        assert torch.equal(model(IDS), reference(IDS))
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        assert not tensor.is_inference(), name
    for net in (model, reference):
        net(IDS).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]


def test_a_model_stays_in_training_mode(tier: str, checkpoint: Path) -> None:
    model = skeleton(Net).train()
    load_on(tier, model, checkpoint)
    assert all(module.training for module in model.modules())


class _Buffered(nn.Module):
    """Small and large buffers, persistent and not; the values of those that are not come from the width alone."""

    mean: torch.Tensor
    table: torch.Tensor
    frequencies: torch.Tensor
    cache: torch.Tensor

    def __init__(self, width: int = 16, rows: int = 40_000) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("table", torch.randn(rows, width))
        self.register_buffer("frequencies", torch.arange(width) / 7.0, persistent=False)
        self.register_buffer("cache", torch.arange(rows * width).view(rows, width) / 3.0, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) + self.mean + self.table[5]
        return x * self.frequencies + self.cache[7]


def _buffered() -> nn.Module:
    return nn.Sequential(*(_Buffered() for _ in range(3)))


def test_persistent_buffers_are_loaded_and_the_others_keep_their_values(tier: str, tmp_path: Path) -> None:
    reference = aligned(_buffered())
    checkpoint = save_checkpoint(reference, tmp_path)
    model = load_on(tier, skeleton(_buffered), checkpoint)
    assert not any(name.endswith(("frequencies", "cache")) for name in model.state_dict())
    assert_same(model, reference, torch.randn(2, 16))


def test_a_skeleton_with_all_its_buffers_on_meta_is_refused_by_the_names_that_no_checkpoint_stores(
    tmp_path: Path,
) -> None:
    checkpoint = save_checkpoint(_buffered(), tmp_path)
    model = skeleton(_buffered, include_buffers=True)
    with pytest.raises(CheckpointMismatchError, match="6 missing from the checkpoint") as caught:
        overspill.load(model, checkpoint, max_memory={}, progress=False)
    message = str(caught.value)
    for number, name in itertools.product(range(3), ("frequencies", "cache")):
        assert f"  {number}.{name} (a buffer that no checkpoint stores: " in message
    assert "include_buffers=False" in message
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_persistent_buffers_on_meta_are_loaded(tier: str, checkpoint: Path, reference: Net) -> None:
    model = skeleton(Net, include_buffers=True)
    assert all(buffer.is_meta for buffer in model.buffers())
    assert_same(load_on(tier, model, checkpoint), reference, IDS)


@pytest.mark.parametrize("streamed", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_takes_no_more_of_the_window_than_was_planned(dtype: torch.dtype, streamed: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(_buffered(), tmp_path)
    model = load_on(streamed, skeleton(_buffered), checkpoint, dtype=dtype)
    manager = managed.managed(model)
    assert manager is not None
    planned = {placement.unit.name: placement.unit.nbytes for placement in manager.plan.placements}
    assert {unit.name: unit.nbytes for unit in streamed_units(model)} == planned


def test_frozen_parameters_stay_frozen(tier: str, checkpoint: Path) -> None:
    model = skeleton(Net)
    frozen = [name for name, _ in model.named_parameters() if "up" in name or "embed" in name]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    load_on(tier, model, checkpoint)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen
    model(IDS).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in frozen), name


def test_what_a_library_has_noted_on_a_parameter_is_kept(tier: str, checkpoint: Path) -> None:
    model = skeleton(Net)
    for number, parameter in enumerate(model.parameters()):
        parameter.note = number  # type: ignore[attr-defined]
    load_on(tier, model, checkpoint)
    notes = [getattr(parameter, "note", None) for parameter in model.parameters()]
    assert notes == list(range(len(notes)))


def test_a_model_with_real_parameters_can_be_loaded_too(tier: str, checkpoint: Path, reference: Net) -> None:
    model = Net().eval()
    assert not torch.equal(model(IDS), reference(IDS))
    load_on(tier, model, checkpoint)
    assert_same(model, reference, IDS)


class _Speech(nn.Module):
    """A recurrent leaf that is large enough to move."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 128, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(256, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize("real", [True, False])
def test_the_second_list_of_a_recurrent_modules_weights_shows_the_same_tensors(
    real: bool, tier: str, tmp_path: Path
) -> None:
    reference = aligned(_Speech()).eval()
    model = _Speech().eval() if real else skeleton(_Speech)
    load_on(tier, model, save_checkpoint(reference, tmp_path))
    lstm = model.lstm
    assert isinstance(lstm, nn.LSTM)

    def assert_one_list() -> None:
        named = [getattr(lstm, name) for name in lstm._flat_weights_names]
        assert len(lstm._flat_weights) == len(named)
        assert all(flat is own for flat, own in zip(lstm._flat_weights, named, strict=True))

    assert_one_list()
    assert_same(model, reference, torch.randn(2, 5, 128))
    assert_one_list()


class _Pair(nn.Module):
    """Two blocks with one large parameter in common, which belongs to neither more than to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_parameter_that_two_blocks_share_is_a_unit_of_its_own(tier: str, tmp_path: Path) -> None:
    reference = aligned(_Pair())
    model = load_on(tier, skeleton(_Pair), save_checkpoint(reference, tmp_path))
    assert ("blocks.0", "blocks.2") in units_by_name(model).values()
    assert model.blocks[0].weight is model.blocks[2].weight  # type: ignore[index, union-attr]
    assert_same(model, reference, torch.randn(2, 512))
    for net in (model, reference):
        net(torch.ones(2, 512)).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


class _Positions(nn.Module):
    """A large parameter of the root itself, which no call announces, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(20_000, 16))
        self.scale = nn.Parameter(torch.randn(16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.embedding(torch.arange(x.shape[0]), self.positions) * self.scale
        for block in self.blocks:
            x = block(x)
        return x + self.positions[: x.shape[0]]


def test_a_large_parameter_of_the_root_itself_is_read_in_place(tier: str, tmp_path: Path) -> None:
    reference = aligned(_Positions())
    model = load_on(tier, skeleton(_Positions), save_checkpoint(reference, tmp_path))
    assert units_by_name(model)["positions"] == ()
    x = torch.randn(4, 16)
    assert_same(model, reference, x)
    for net in (model, reference):
        net(x).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]


class _Uncalled(nn.Module):
    """A large leaf whose weights are used without a call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 512)
        self.second = nn.Linear(512, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.first(x), self.second.weight, self.second.bias)


def test_a_leaf_that_is_used_without_being_called_is_right(tier: str, tmp_path: Path) -> None:
    reference = aligned(_Uncalled())
    model = load_on(tier, skeleton(_Uncalled), save_checkpoint(reference, tmp_path))
    assert "second" in units_by_name(model)
    assert_same(model, reference, torch.randn(2, 64))


class _Odd(nn.Module):
    """Tensors of odd shapes and dtypes, as parameters and as buffers."""

    mask: torch.Tensor
    steps: torch.Tensor
    eighth_table: torch.Tensor
    mask_table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.empty = nn.Parameter(torch.empty(0, 16))
        self.scalar = nn.Parameter(torch.randn(()))
        self.eighth = nn.Parameter(torch.randn(16).to(torch.float8_e4m3fn), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.kept = nn.Parameter(torch.rand(16) < 0.5, requires_grad=False)
        self.codes = nn.Parameter(torch.randint(-128, 128, (16,), dtype=torch.int8), requires_grad=False)
        self.register_buffer("mask", torch.rand(16) < 0.5)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(3, 0, dtype=torch.int8))
        self.register_buffer("eighth_table", torch.randn(80_000, 16).to(torch.float8_e5m2))
        self.register_buffer("mask_table", torch.rand(80_000, 16) < 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight + self.empty.sum() + self.scalar + self.eighth.to(x.dtype)
        x = x * self.phase.abs() + self.codes * self.kept + self.steps
        row = torch.tensor([11])
        table = torch.where(self.mask_table.index_select(0, row), 1.0, -1.0)
        return x * self.mask + table + self.eighth_table.index_select(0, row).to(x.dtype)


@pytest.mark.parametrize("form", ["safetensors file", "bin"])
def test_tensors_of_odd_shapes_and_dtypes_are_right(form: str, tier: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(_Odd() for _ in range(3)))

    reference = aligned(build())
    model = load_on(tier, skeleton(build), FORMS[form](state_of(reference), tmp_path / "checkpoint"))
    assert_same(model, reference, torch.randn(2, 16))


def test_a_model_without_tensors_loads_from_an_empty_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Identity())
    overspill.load(model, save_state({}, tmp_path / "model.safetensors"), max_memory={}, progress=False)
    assert torch.equal(model(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


# ---------------------------------------------------------------- if anything fails, the model is left as it was


def test_no_room_for_the_window_leaves_the_model_as_it_was(
    checkpoint: Path, reference: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = skeleton(Net)

    def no_room(*_: object, **__: object) -> None:
        raise MemoryError("no room for the window")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "Window", no_room)
        with pytest.raises(MemoryError):
            load_on("disk", model, checkpoint, dtype=torch.bfloat16, offload_folder=tmp_path / "offload")
    assert_untouched(model)
    gc.collect()
    assert content(tmp_path / "offload") == {}
    assert_same(load_on("disk", model, checkpoint), reference, IDS)


@pytest.mark.parametrize("failing", ["cpu", "device"])
def test_a_read_that_fails_leaves_the_model_as_it_was(
    failing: str, checkpoint: Path, reference: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = skeleton(Net)
    real, count = os.preadv, itertools.count()

    def preadv(*args: Any) -> int:
        if next(count) == 7:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(overspill.errors.CheckpointReadError, match=re.escape(str(checkpoint))):
            load_on(failing, model, checkpoint)
    assert_untouched(model)
    assert_same(load_on(failing, model, checkpoint), reference, IDS)


# ---------------------------------------------------------------- the bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen_on_a_terminal(checkpoint: Path, *, progress: bool) -> str:
    """What a load of everything into memory writes to a terminal."""
    terminal = _Terminal()
    with pytest.MonkeyPatch.context() as patch:  # not in a fixture: pytest sets its own stderr after those
        patch.setattr(sys, "stderr", terminal)
        overspill.load(skeleton(Net), checkpoint, max_memory={"cpu": "1GiB"}, progress=progress)
    return terminal.getvalue()


def test_a_terminal_sees_a_bar_that_ends_at_the_bytes_that_were_read(checkpoint: Path, reference: Net) -> None:
    total = sum(tensor.nbytes for tensor in (*reference.parameters(), *reference.buffers()))  # a tie counts once
    last = seen_on_a_terminal(checkpoint, progress=True).rstrip().split("\r")[-1]
    assert "100%" in last
    assert f"{total / 1000:.1f}k/{total / 1000:.1f}k" in last
    assert "B/s" in last


def test_progress_false_is_silent_on_a_terminal(checkpoint: Path) -> None:
    assert seen_on_a_terminal(checkpoint, progress=False) == ""


def test_a_log_sees_no_bar(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overspill.load(skeleton(Net), checkpoint, max_memory={"cpu": "1GiB"})
    assert capfd.readouterr() == ("", "")


def test_a_terminal_that_goes_away_does_not_stop_the_load(checkpoint: Path) -> None:
    program = f"""
        import os, sys, torch, overspill
        from support import Net

        master, slave = os.openpty()
        real, sys.stderr = sys.stderr, os.fdopen(slave, "w")
        assert sys.stderr.isatty()
        with overspill.empty_weights():
            model = Net().eval()
        os.close(master)  # from now on the terminal gives errors
        try:
            overspill.load(model, {str(checkpoint)!r}, max_memory={{"cpu": "1GiB"}})
        finally:
            sys.stderr = real
        model(torch.arange(4))
    """
    run_program(program)
