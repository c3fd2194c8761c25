"""A model that Accelerate has dispatched is taken over: same bits, same bytes where they lie, and a way back."""

import copy
import functools
import gc
import itertools
import os
import pickle
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as hf
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from safetensors.torch import save_file
from torch import nn

import overspill
from overspill.attach import MANAGER
from overspill.bundles import OffloadRoot
from overspill.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReadError,
    OffloadFolderError,
    PlanError,
    StateError,
)
from overspill.homes import DiskTensor, HostTensor
from overspill.managed import managed
from overspill.moving import Mover
from overspill.plan import Tier
from support import Net, aligned, narrow, placed, run


class _StandIn(str):
    """Names the CPU to torch and to safetensors, and is another device to Accelerate, which compares names."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


GPU: Any = _StandIn("cpu")
"""What plays the accelerator in device maps: beside it, what is mapped to "cpu" is offloaded, as beside a GPU."""

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


# ---------------------------------------------------------------- models of our own, dispatched in every way


class Model(Net):
    """A tied net whose root has a parameter and a buffer that nobody saves."""

    mask: torch.Tensor

    def __init__(self, tied: bool = True) -> None:
        super().__init__(blocks=3, tied=tied)
        self.offset = nn.Parameter(torch.randn(64))
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 64), persistent=False)
        self.get_parameter("blocks.1.up.weight").requires_grad_(False)
        self.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.mask + self.offset


THREE_TIERS = {"embed": GPU, "blocks.0": GPU, "blocks.1": "cpu", "blocks.2": "disk", "norm": "cpu", "head": "disk"}
THREE_TIERS |= {"offset": "cpu"}


@dataclass(frozen=True)
class Way:
    """How a model gets dispatched, and which parameters are on disk then."""

    dispatch: Callable[[Model, Path], Any]
    on_disk: Callable[[str], bool]
    tied: bool = True

    def make(self, folder: Path) -> tuple[Any, Model]:
        """A dispatched model whose files are in `folder`, and the same one that nobody has touched."""
        reference = Model(self.tied)
        return self.dispatch(copy.deepcopy(reference), folder), reference


def by_cpu_offload(model: Model, folder: Path) -> Any:
    return accelerate.cpu_offload(model)


def by_disk_offload(model: Model, folder: Path, **options: Any) -> Any:
    # It leaves nothing by which to tell a tie of two modules from two equal tensors: the models here have none.
    return accelerate.disk_offload(model, folder, **options)


def by_dispatch(model: Model, folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")  # offset
        return accelerate.dispatch_model(model, THREE_TIERS, offload_dir=folder, **options)


def by_checkpoint(model: Model, folder: Path) -> Any:
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    with accelerate.init_empty_weights():
        skeleton = Model(tied=False)
    skeleton.get_parameter("blocks.1.up.weight").requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")  # offset
        return accelerate.load_checkpoint_and_dispatch(
            skeleton.eval(), folder, THREE_TIERS, offload_folder=folder / "offload", offload_buffers=True
        )


def _all(name: str) -> bool:
    return name != "offset"  # too small to be worth a unit, as a parameter of a container


def _third_block(name: str) -> bool:
    return name.startswith("blocks.2.")


def _third_block_and_head(name: str) -> bool:
    return _third_block(name) or name == "head.weight"


WAYS = {
    "cpu_offload": Way(by_cpu_offload, lambda name: False),
    "disk_offload": Way(by_disk_offload, _all, tied=False),
    "disk_offload, buffers": Way(functools.partial(by_disk_offload, offload_buffers=True), _all, tied=False),
    "dispatch_model": Way(by_dispatch, _third_block),  # the head is tied to the embedding, which is nearer
    "dispatch_model, buffers": Way(functools.partial(by_dispatch, offload_buffers=True), _third_block),
    "load_checkpoint_and_dispatch": Way(by_checkpoint, _third_block_and_head, tied=False),
}
USES_DISK = [name for name in WAYS if name != "cpu_offload"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where Accelerate puts its files."""
    return tmp_path / "offload"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files would go."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(scratch)
    return scratch


# ---------------------------------------------------------------- Transformers' models


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "num_hidden_layers": 3, "max_position_embeddings": 32}

LLAMA_TIERS = {
    "model.embed_tokens": GPU,
    "model.rotary_emb": GPU,
    "model.layers.0": GPU,
    "model.layers.1": "cpu",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "lm_head": "disk",
}
T5_TIERS = {"shared": GPU, "encoder": "cpu", "decoder": "disk", "lm_head": GPU}


def llama(tied: bool = False) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=tied))


def mixtral() -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2))


def t5() -> Any:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


BUILDS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied llama": functools.partial(llama, tied=True),
    "mixtral": mixtral,
    "t5": t5,
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder that Transformers saved a model to, in several files."""

    kind: type
    folder: Path

    def resident(self, **options: Any) -> Any:
        return aligned(self.kind.from_pretrained(self.folder, **options))  # type: ignore[attr-defined]

    def dispatched(self, device_map: Any, offload_folder: Path, **options: Any) -> Any:
        options |= {"device_map": device_map, "offload_folder": offload_folder}
        return self.kind.from_pretrained(self.folder, **options)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    torch.manual_seed(0)
    made = {}
    for name, build in BUILDS.items():
        folder, model = tmp_path_factory.mktemp("checkpoint"), build()
        model.save_pretrained(folder, max_shard_size="20KB")
        for file in folder.glob("*.safetensors"):
            _align_data(file)
        made[name] = Checkpoint(type(model), folder)
    return made


def _align_data(file: Path) -> None:
    """Have tensors start at multiples of 64 bytes, so that one that is mapped into memory computes the same bits."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    padding = -(8 + size) % 64
    header = content[8 : 8 + size] + b" " * padding
    file.write_bytes((size + padding).to_bytes(8, "little") + header + content[8 + size :])


def logits(model: Any) -> torch.Tensor:
    inputs = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS, **inputs).logits
    return result


# ---------------------------------------------------------------- what the tests look at


def assert_right(model: nn.Module, reference: nn.Module) -> None:
    """Both give the same bits, time and again."""
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS), reference(IDS))


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)


def ties(model: nn.Module) -> list[list[str]]:
    """Names that show one object, for each object that has several."""
    names: dict[int, list[str]] = {}
    shown = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in shown:
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def assert_same_state(model: nn.Module, reference: nn.Module) -> None:
    """The same names, with the same values, dtypes and flags, tied alike."""
    ours, theirs = named_tensors(model), named_tensors(reference)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, tensor), (_, other) in zip(ours, theirs, strict=True):
        assert isinstance(tensor, nn.Parameter) == isinstance(other, nn.Parameter), name
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
        assert tensor.requires_grad == other.requires_grad, name
        assert torch.equal(bits(tensor), bits(other)), name
    assert ties(model) == ties(reference)
    saved = model.state_dict()
    assert list(saved) == list(reference.state_dict())
    assert all(torch.equal(bits(saved[name]), bits(value)) for name, value in reference.state_dict().items())


ACCELERATES = {"_hf_hook", "_old_forward", "forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"}


def assert_free_of_accelerate(model: nn.Module) -> None:
    assert {path: left for path, m in model.named_modules() if (left := ACCELERATES & set(vars(m)))} == {}


def assert_plain(model: nn.Module, reference: nn.Module) -> None:
    """No hook, attribute, wrapped forward or class is left that its untouched twin has not; but for the device map."""
    for (path, module), other in zip(model.named_modules(), reference.modules(), strict=True):
        assert type(module) is type(other), path
        assert set(vars(module)) - {"hf_device_map"} == set(vars(other)) - {"hf_device_map"}, path
        assert module._compiled_call_impl is None, path
        for key, value in vars(other).items():
            if "hooks" in key:
                assert len(vars(module)[key]) == len(value), f"{path}.{key}"
    for (name, tensor), (_, same) in zip(named_tensors(model), named_tensors(reference), strict=True):
        assert type(tensor) is type(same), name
        assert set(vars(tensor)) <= set(vars(same)), name  # Accelerate drops what others have noted there
        assert not tensor.is_inference(), name
        assert tensor.is_leaf, name
        assert tensor.device == same.device, name


def assert_ordinary(model: nn.Module, reference: nn.Module) -> None:
    """A plain model that runs, copies, pickles, saves and trains as its untouched twin does."""
    assert_plain(model, reference)
    assert_same_state(model, reference)
    assert_right(model, reference)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_plain(copied, reference)
        assert_same_state(copied, reference)
    model.load_state_dict(model.state_dict())
    assert_trains(model, reference)


def assert_trains(model: nn.Module, reference: nn.Module) -> None:
    for net in (model, reference):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(IDS).square().mean().backward()
        optimizer.step()
    assert any(p.grad is not None for p in model.parameters())
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
        assert torch.equal(bits(p), bits(q)), name
        p.grad = q.grad = None
    assert_right(model, reference)


def on_disk(model: nn.Module) -> set[str]:
    return {name for name, tensor in named_tensors(model) if isinstance(tensor, DiskTensor)}


def on_host(model: nn.Module) -> set[str]:
    return {name for name, tensor in named_tensors(model) if isinstance(tensor, HostTensor)}


def bytes_of(model: nn.Module, names: set[str]) -> int:
    return sum(tensor.nbytes for name, tensor in named_tensors(model) if name in names)


def files_of(model: nn.Module, names: set[str] | None = None) -> set[Path]:
    """The files that values are read from."""
    homes = [t for name, t in named_tensors(model) if isinstance(t, DiskTensor) and (names is None or name in names)]
    return {span.file.path for home in homes for span in home._overspill_values.spans}


def listed(*folders: Path) -> dict[Path, tuple[int, int, int]]:
    """Every file below, with what changes when it is written to or replaced."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: ((about := path.stat()).st_size, about.st_mtime_ns, about.st_ino) for path in files}


def everything_about(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What each module holds, tensors by identity, hooks with all that is in them."""
    about = {}
    for path, module in model.named_modules():
        tables = {"parameters": module._parameters, "buffers": module._buffers}
        tensors = {f"{kind} {name}": id(tensor) for kind, table in tables.items() for name, tensor in table.items()}
        rest = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers")}
        hook = vars(module).get("_hf_hook")
        about[path] = {**tensors, **rest, "in the hook": dict(vars(hook)) if hook else None}
    return about


class Untouched:
    """A dispatched model, to be compared after something that must not have changed it or any file."""

    def __init__(self, model: nn.Module, reference: nn.Module, *folders: Path) -> None:
        self._model, self._reference, self._folders = model, reference, folders
        self._before, self._files = everything_about(model), listed(*folders)

    def check(self) -> None:
        assert everything_about(self._model) == self._before
        assert listed(*self._folders) == self._files
        assert any("_hf_hook" in vars(module) for module in self._model.modules())
        assert_right(self._model, self._reference)  # through Accelerate


# ---------------------------------------------------------------- taken over


def test_outputs_state_and_ties_are_those_of_the_untouched_model(way: Way, folder: Path, moved: Counter[str]):
    model, reference = way.make(folder)
    expected = {name for name, _ in reference.named_parameters() if way.on_disk(name)}
    assert overspill.adopt(model) is model
    assert_free_of_accelerate(model)
    assert {name for name in on_disk(model) if name in dict(model.named_parameters())} == expected
    moved.clear()
    assert_right(model, reference)
    assert moved["disk"] >= bytes_of(reference, expected)
    assert (moved["disk"] > 0) == (way is not WAYS["cpu_offload"])
    assert_same_state(model, reference)
    assert ties(model) == ([["embed.weight", "head.weight"]] if way.tied else [])


def test_nothing_is_written_and_files_stay_as_they_are(way: Way, folder: Path, scratch: Path):
    model, reference = way.make(folder)
    before = listed(folder)
    assert (before == {}) == (way is WAYS["cpu_offload"])
    overspill.adopt(model)
    assert_right(model, reference)
    assert files_of(model) <= before.keys()
    assert bool(files_of(model)) == bool(before)
    assert listed(folder) == before
    assert listed(scratch) == {}
    assert list(scratch.iterdir()) == []


def test_no_weight_is_copied(folder: Path):
    original = Model()
    memory = {name: p.data_ptr() for name, p in original.named_parameters()}
    model = by_dispatch(original, folder)
    resident = {name: p for name, p in model.named_parameters() if not p.is_meta}
    assert {"embed.weight", "blocks.0.up.weight"} <= resident.keys()
    overspill.adopt(model)
    shown = dict(model.named_parameters())
    assert all(shown[name] is p for name, p in resident.items()), "what is resident stays the same object"
    for name in ("blocks.1.up.weight", "blocks.1.norm.bias", "norm.weight", "offset"):
        assert shown[name].data_ptr() == memory[name]


def test_a_disk_weight_is_the_file_that_accelerate_wrote(folder: Path):
    model, _ = WAYS["disk_offload"].make(folder)
    overspill.adopt(model)
    for name in ("blocks.0.up.weight", "blocks.2.scale", "embed.weight"):
        assert files_of(model, {name}) == {folder / f"{name}.dat"}


def test_hooks_of_the_user_among_accelerates_stay(folder: Path):
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return 2 * output

    mine = Doubling()
    model, _ = WAYS["disk_offload"].make(folder)
    assert isinstance(model._hf_hook, SequentialHook)  # the root has tensors of its own
    add_hook_to_module(model.blocks[1], mine, append=True)
    with torch.no_grad():
        expected = model(IDS)
        overspill.adopt(model)
        assert "_hf_hook" not in vars(model)
        assert list(model.blocks[1]._hf_hook.hooks) == [mine]
        for _ in range(2):
            assert torch.equal(model(IDS), expected)


def test_a_model_that_the_user_has_hooks_on_can_be_restored_too(folder: Path):
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return 2 * output

    adopted, _ = WAYS["disk_offload"].make(folder)
    add_hook_to_module(adopted.blocks[1], Doubling(), append=True)
    in_memory = add_hook_to_module(nn.Sequential(nn.Embedding(64, 32)), Doubling())
    with torch.no_grad():
        for model, move in ((adopted, overspill.adopt), (in_memory, functools.partial(overspill.offload, to="disk"))):
            expected = model(IDS)
            move(model)
            assert on_disk(model)
            overspill.restore(model)
            assert on_disk(model) == set()
            assert torch.equal(model(IDS), expected)


def test_what_an_interrupted_call_left_behind_does_not_count(folder: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    with pytest.raises(IndexError):
        model(torch.tensor([64]))
    assert not model.embed.weight.is_meta
    overspill.adopt(model)
    assert_same_state(model, reference)
    assert_right(model, reference)


def test_a_part_of_a_dispatched_model_is_adopted_alone(folder: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    overspill.adopt(model.blocks[1])
    assert {name for name in on_disk(model) if not name.startswith("blocks.1.")} == set()
    assert "_hf_hook" not in vars(model.blocks[1].up)
    assert "_hf_hook" in vars(model.blocks[0].up)
    assert_right(model, reference)


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU])
def test_recurrent_layers_use_the_weights_that_they_show(recurrent: Any, folder: Path):
    reference = nn.Sequential(nn.Embedding(64, 32), recurrent(32, 32, batch_first=True))
    model = accelerate.disk_offload(copy.deepcopy(reference), folder)
    overspill.adopt(model)
    assert len(on_disk(model)) == 5
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS)[0], reference(IDS)[0])


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_running_statistics_go_on_where_they_were(offload_buffers: bool, folder: Path):
    reference = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(0, 1), nn.Linear(32, 32), nn.BatchNorm1d(32))
    nn.init.uniform_(reference.get_buffer("3.running_mean"))
    model = accelerate.disk_offload(copy.deepcopy(reference), folder, offload_buffers=offload_buffers)
    overspill.adopt(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(IDS), reference(IDS))
    assert_same_state(model, reference)
    assert int(model[3].num_batches_tracked) == 3


def test_an_adopted_model_trains(folder: Path, moved: Counter[str]):
    model, reference = WAYS["disk_offload"].make(folder)
    before = listed(folder)
    overspill.adopt(model)
    moved.clear()
    assert_trains(model, reference)
    assert moved["disk"] > 0
    assert listed(folder) == before


# ---------------------------------------------------------------- from_pretrained


def test_a_transformers_model_is_adopted_from_its_own_checkpoint(
    checkpoints: dict[str, Checkpoint], folder: Path, scratch: Path, moved: Counter[str]
):
    checkpoint = checkpoints["llama"]
    reference, model = checkpoint.resident(), checkpoint.dispatched(LLAMA_TIERS, folder)
    before, device_map = listed(checkpoint.folder, folder), dict(model.hf_device_map)
    overspill.adopt(model)
    assert_free_of_accelerate(model)
    assert model.hf_device_map == device_map == LLAMA_TIERS
    expected = {name for name, _ in reference.named_parameters() if name.startswith(("model.layers.2", "lm_head"))}
    assert on_disk(model) == expected
    moved.clear()
    for _ in range(2):
        assert torch.equal(logits(model), logits(reference))
    assert moved["disk"] >= bytes_of(reference, expected)
    assert_same_state(model, reference)
    assert {path.parent for path in files_of(model)} == {checkpoint.folder}
    assert listed(checkpoint.folder, folder) == before
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        pytest.param(GPU, GPU, id="gpu-gpu"),
        pytest.param(GPU, "cpu", id="gpu-cpu"),
        pytest.param(GPU, "disk", id="gpu-disk"),
        pytest.param("cpu", GPU, id="cpu-gpu"),
        pytest.param("cpu", "cpu", id="cpu-cpu"),
        pytest.param("cpu", "disk", id="cpu-disk"),
        pytest.param("disk", "cpu", id="disk-cpu"),
        pytest.param("disk", "disk", id="disk-disk"),  # disk-gpu is more than Accelerate can dispatch
    ],
)
def test_a_tied_embedding_is_one_tensor_again(
    embedding: Any, head: Any, checkpoints: dict[str, Checkpoint], folder: Path
):
    checkpoint = checkpoints["tied llama"]
    reference = checkpoint.resident()
    model = checkpoint.dispatched({**LLAMA_TIERS, "model.embed_tokens": embedding, "lm_head": head}, folder)
    overspill.adopt(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for _ in range(2):
        assert torch.equal(logits(model), logits(reference))
    assert_same_state(model, reference)
    with torch.no_grad():
        for net in (model, reference):
            net.model.embed_tokens.weight[5] += 1
    assert torch.equal(logits(model), logits(reference))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_ties_hold_after_accelerate_has_run_the_model(checkpoints: dict[str, Checkpoint], folder: Path):
    checkpoint = checkpoints["tied llama"]
    reference = checkpoint.resident()
    model = checkpoint.dispatched(dict.fromkeys(LLAMA_TIERS, "disk"), folder)
    logits(model)
    overspill.adopt(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(reference))
    assert_same_state(model, reference)


def test_fused_experts_are_read_from_the_files_that_transformers_made(
    checkpoints: dict[str, Checkpoint], folder: Path, scratch: Path
):
    checkpoint = checkpoints["mixtral"]
    reference, model = checkpoint.resident(), checkpoint.dispatched(LLAMA_TIERS, folder)
    before = listed(checkpoint.folder, folder)
    overspill.adopt(model)
    for _ in range(2):
        assert torch.equal(logits(model), logits(reference))
    assert_same_state(model, reference)
    assert {path.parent for path in files_of(model)} == {checkpoint.folder, folder}
    assert listed(checkpoint.folder, folder) == before
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("device_map", [T5_TIERS, {"": "disk"}], ids=["three tiers", "disk"])
def test_what_a_model_keeps_in_float32_stays_so(
    device_map: Any, checkpoints: dict[str, Checkpoint], folder: Path, scratch: Path
):
    checkpoint = checkpoints["t5"]
    reference = checkpoint.resident(dtype=torch.float16)
    model = checkpoint.dispatched(device_map, folder, dtype=torch.float16)
    before = listed(checkpoint.folder, folder)
    overspill.adopt(model)
    feed_forward = model.decoder.block[1].layer[2].DenseReluDense
    assert (feed_forward.wo.weight.dtype, feed_forward.wi.weight.dtype) == (torch.float32, torch.float16)
    assert isinstance(feed_forward.wo.weight, DiskTensor)
    for _ in range(2):
        assert torch.equal(logits(model), logits(reference))
    assert_same_state(model, reference)
    assert listed(checkpoint.folder, folder) == before
    # What is stored as it is needed is read where it lies, the rest was cast to a file of our own.
    decoder = "decoder.block.1.layer.2.DenseReluDense"
    assert {path.parent for path in files_of(model, {f"{decoder}.wo.weight"})} == {checkpoint.folder}
    assert all(path.is_relative_to(scratch) for path in files_of(model, {f"{decoder}.wi.weight"}))
    assert listed(scratch)


@pytest.mark.parametrize("way_back", ["restore", "delete", "forget"])
def test_files_of_a_cast_go_when_nobody_needs_them(
    way_back: str, checkpoints: dict[str, Checkpoint], folder: Path, scratch: Path
):
    checkpoint = checkpoints["llama"]
    reference = checkpoint.resident(dtype=torch.bfloat16)
    model = checkpoint.dispatched(LLAMA_TIERS, folder, dtype=torch.bfloat16)
    before = listed(checkpoint.folder, folder)
    overspill.adopt(model)
    assert torch.equal(logits(model), logits(reference))
    assert all(path.is_relative_to(scratch) for path in files_of(model))
    assert sum(path.stat().st_size for path in files_of(model)) >= bytes_of(model, on_disk(model)) > 0
    if way_back == "forget":
        del model
        gc.collect()
    else:
        overspill.restore(model, delete=way_back == "delete")
        assert torch.equal(logits(model), logits(reference))
    assert list(scratch.iterdir()) == []
    assert listed(checkpoint.folder, folder) == before


def test_a_checkpoint_that_accelerate_casts_at_each_call_is_cast_once(
    checkpoints: dict[str, Checkpoint], folder: Path, scratch: Path
):
    checkpoint = checkpoints["llama"]
    reference = checkpoint.resident(dtype=torch.bfloat16)
    with accelerate.init_empty_weights():
        model = llama()
    accelerate.load_checkpoint_and_dispatch(
        model.eval(), checkpoint.folder, LLAMA_TIERS, offload_folder=folder, dtype=torch.bfloat16
    )
    before = listed(checkpoint.folder, folder)
    overspill.adopt(model)
    for _ in range(2):
        assert torch.equal(logits(model), logits(reference))
    assert_same_state(model, reference)
    assert listed(checkpoint.folder, folder) == before
    assert files_of(model)
    assert all(path.is_relative_to(scratch) for path in files_of(model))


@pytest.mark.parametrize("name", ["tied llama", "t5"])
def test_greedy_tokens_are_the_resident_models(
    name: str, checkpoints: dict[str, Checkpoint], folder: Path, moved: Counter[str]
):
    checkpoint = checkpoints[name]
    reference = checkpoint.resident()
    model = checkpoint.dispatched(T5_TIERS if name == "t5" else LLAMA_TIERS, folder)
    overspill.adopt(model)
    moved.clear()
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "pad_token_id": 0}
    ours, theirs = model.generate(IDS, **options), reference.generate(IDS, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(map(torch.equal, ours.logits, theirs.logits))
    assert len(ours.logits) == 8
    assert moved["disk"] >= bytes_of(model, on_disk(model)) > 0


# ---------------------------------------------------------------- to other places than Accelerate's


def is_block(name: str) -> bool:
    return name.startswith("blocks.")


def test_a_plan_brings_what_was_on_disk_into_memory(folder: Path, moved: Counter[str]):
    model, reference = WAYS["disk_offload"].make(folder)
    overspill.adopt(model, overspill.plan(model, {"cpu": "1GiB"}, device="cpu"))
    moved.clear()
    assert_ordinary(model, reference)
    assert managed(model) is None
    assert not moved, "a model that fits runs as if nobody had offloaded it"


def test_a_plan_sends_what_was_in_memory_to_disk(folder: Path, scratch: Path, moved: Counter[str]):
    model, reference = WAYS["cpu_offload"].make(folder)
    overspill.adopt(model, narrow(overspill.plan(model, {}, device="cpu")))
    blocks = {name for name, _ in reference.named_parameters() if is_block(name)}
    assert on_disk(model) >= blocks
    assert all(path.is_relative_to(scratch) for path in files_of(model))
    moved.clear()
    assert_right(model, reference)
    assert moved["disk"] >= bytes_of(reference, blocks)
    assert_same_state(model, reference)
    overspill.restore(model)
    assert list(scratch.iterdir()) == []
    assert_ordinary(model, reference)


@pytest.mark.parametrize("name", USES_DISK)
def test_everything_goes_to_disk_and_only_what_is_not_there_is_written(name: str, folder: Path, scratch: Path):
    model, reference = WAYS[name].make(folder)
    before = listed(folder)
    overspill.adopt(model, overspill.plan(model, {}, device="cpu"))
    blocks = {name for name, _ in reference.named_parameters() if is_block(name)}
    assert on_disk(model) >= blocks
    there = {name for name in blocks if WAYS["dispatch_model"].on_disk(name)}
    assert {path.parent for path in files_of(model, there)} <= {folder, folder / "offload"}
    ours = files_of(model) - before.keys()
    written = sum(path.stat().st_size for path in ours)
    needed = bytes_of(reference, {name for name in on_disk(model) if not files_of(model, {name}) <= before.keys()})
    assert needed <= written < needed + 8192 * len(ours) + 1, "written once, with headers"
    if name == "disk_offload, buffers":
        assert written == 0
        assert list(scratch.iterdir()) == []
    assert_right(model, reference)
    assert_same_state(model, reference)
    assert listed(folder) == before


@pytest.mark.parametrize("name", WAYS)
def test_a_plan_streams_from_host_memory(name: str, folder: Path, moved: Counter[str]):
    model, reference = WAYS[name].make(folder)
    overspill.adopt(model, placed(narrow(overspill.plan(model, {}, device="cpu")), "cpu"))
    blocks = {name for name, _ in reference.named_parameters() if is_block(name)}
    assert on_host(model) >= blocks
    assert on_disk(model) == set()
    moved.clear()
    assert_right(model, reference)
    assert moved["cpu"] >= bytes_of(reference, blocks)
    assert moved["disk"] == 0
    assert_same_state(model, reference)
    overspill.restore(model)
    assert_ordinary(model, reference)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("made", ["before the dispatch", "after it", "after a call"])
def test_a_plan_of_a_tied_model_holds_whenever_it_was_made(tier: str, made: str, folder: Path):
    reference = Net(blocks=2, width=512).eval()
    reference.embed.weight = reference.head.weight = nn.Parameter(torch.randn(1024, 512))  # so large that it is a unit
    model: Any = copy.deepcopy(reference)
    early = overspill.plan(model, {}, device="cpu")
    accelerate.dispatch_model(model, dict.fromkeys(["embed", "blocks", "norm", "head"], "disk"), offload_dir=folder)
    if made == "after a call":
        model(IDS)
    plan = early if made == "before the dispatch" else overspill.plan(model, {}, device="cpu")
    assert "embed" in {placement.unit.name for placement in plan.placements}
    overspill.adopt(model, placed(plan, tier))
    assert {"embed.weight"} <= (on_disk(model) | on_host(model))
    assert model.head.weight is model.embed.weight
    assert_right(model, reference)
    assert_same_state(model, reference)


@pytest.mark.parametrize(
    ("plan", "culprit"),
    [
        pytest.param(lambda model: overspill.plan(nn.Linear(4, 4), {}, device="cpu"), "embed.weight", id="other"),
        pytest.param(
            lambda model: overspill.plan(model, {}, dtype=torch.bfloat16, device="cpu"), "torch.bfloat16", id="dtype"
        ),
    ],
)
def test_a_plan_that_does_not_fit_leaves_the_model_with_accelerate(
    plan: Any, culprit: str, folder: Path, scratch: Path
):
    model, reference = WAYS["disk_offload"].make(folder)
    wrong, untouched = plan(model), Untouched(model, reference, folder, scratch)
    with pytest.raises(PlanError, match=culprit):
        overspill.adopt(model, wrong)
    untouched.check()


# ---------------------------------------------------------------- the way back


@pytest.mark.parametrize("name", USES_DISK)
def test_an_adopted_model_is_restored_to_an_ordinary_one(name: str, folder: Path, scratch: Path):
    model, reference = WAYS[name].make(folder)
    before = listed(folder)
    overspill.adopt(model)
    assert on_disk(model)
    shown = {name: id(tensor) for name, tensor in named_tensors(model)}
    assert_right(model, reference)
    assert overspill.restore(model) is model
    assert {name: id(tensor) for name, tensor in named_tensors(model)} == shown
    assert_ordinary(model, reference)
    assert listed(folder) == before
    assert list(scratch.iterdir()) == []
    with pytest.raises(StateError, match="nothing to restore"):
        overspill.restore(model)


def test_what_was_in_host_memory_is_ordinary_as_soon_as_it_is_adopted(folder: Path):
    model, reference = WAYS["cpu_offload"].make(folder)
    overspill.adopt(model)
    assert_ordinary(model, reference)


@pytest.mark.parametrize("delete", [False, True])
def test_a_model_that_still_has_its_hooks_is_restored(delete: bool, way: Way, folder: Path, scratch: Path):
    model, reference = way.make(folder)
    before = listed(folder)
    assert overspill.restore(model, delete=delete) is model
    assert MANAGER not in vars(model)
    assert_ordinary(model, reference)
    assert listed(folder) == before, "the files are Accelerate's"
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("dispatched", [True, False], ids=["dispatched", "adopted"])
def test_some_modules_are_restored_and_the_others_stay_on_disk(dispatched: bool, folder: Path, moved: Counter[str]):
    model, reference = WAYS["disk_offload"].make(folder)
    before = listed(folder)
    if not dispatched:
        overspill.adopt(model)
    overspill.restore(model, modules=["blocks.1", "norm"], delete=True)
    back = {name for name, _ in reference.named_parameters() if name.startswith(("blocks.1.", "norm."))}
    assert on_disk(model) == {name for name, _ in reference.named_parameters()} - back - {"offset"}
    assert_free_of_accelerate(model)
    moved.clear()
    assert_right(model, reference)
    assert moved["disk"] >= bytes_of(reference, on_disk(model))
    assert listed(folder) == before
    overspill.restore(model)
    assert_ordinary(model, reference)


@pytest.mark.parametrize("dispatched", [True, False], ids=["dispatched", "adopted"])
def test_restored_modules_come_in_the_dtype_and_on_the_device_that_was_asked_for(dispatched: bool, folder: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    if not dispatched:
        overspill.adopt(model)
    overspill.restore(model, modules="blocks.1", device="cpu", dtype=torch.float64)
    cast = {name: tensor for name, tensor in named_tensors(model) if name.startswith("blocks.1.")}
    for name, tensor in cast.items():
        assert (tensor.dtype, tensor.device.type) == (torch.float64, "cpu"), name
        assert torch.equal(tensor, reference.get_submodule("blocks.1").double().state_dict()[name[9:]]), name
    assert {model.blocks[0].up.weight.dtype, model.embed.weight.dtype} == {torch.float32}
    overspill.restore(model, dtype=torch.bfloat16)
    assert {p.dtype for name, p in model.named_parameters() if name not in cast} == {torch.bfloat16}
    assert on_disk(model) == set()


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        pytest.param({"modules": ["blocks.7"]}, "blocks.7", id="path"),
        pytest.param({"dtype": torch.int8}, "torch.int8", id="dtype"),
        pytest.param({"device": "floppy"}, "floppy", id="device"),
    ],
)
def test_a_wrong_wish_leaves_the_model_with_accelerate(options: Any, culprit: str, folder: Path, scratch: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    untouched = Untouched(model, reference, folder, scratch)
    with pytest.raises((PlanError, ValueError), match=culprit):
        overspill.restore(model, **options)
    untouched.check()


def test_a_model_that_is_partly_offloaded_and_partly_dispatched_is_restored(folder: Path):
    reference = Model()
    model: Any = copy.deepcopy(reference)
    accelerate.disk_offload(model.blocks[0], folder)
    overspill.offload(model.blocks[2], to="disk")
    overspill.restore(model)
    assert_ordinary(model, reference)


def test_a_transformers_model_is_ordinary_again(checkpoints: dict[str, Checkpoint], folder: Path, tmp_path: Path):
    checkpoint = checkpoints["tied llama"]
    reference, model = checkpoint.resident(), checkpoint.dispatched(LLAMA_TIERS, folder)
    overspill.restore(overspill.adopt(model))
    assert_plain(model, reference)
    assert_same_state(model, reference)
    assert torch.equal(logits(model), logits(reference))
    assert torch.equal(logits(copy.deepcopy(model)), logits(reference))
    for net in (model, reference):
        net(input_ids=IDS, labels=IDS).loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")  # so says its device map
        model.save_pretrained(tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved")
    assert_same_state(saved, reference)


# ---------------------------------------------------------------- life after adoption


def edit(model: Any) -> None:
    """In each way in which people edit: in place, through .data, by assignment, by a whole state."""
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
        model.blocks[1].down.weight.data.add_(0.25)
        model.blocks[2].up.bias[3] = 1.5
        model.blocks[2].up.weight = nn.Parameter(torch.full((64, 32), 0.125))
        model.embed.weight[7] = -1
        model.offset.copy_(torch.linspace(-1, 1, 64))


def test_edits_of_an_adopted_model_are_kept(way: Way, folder: Path):
    model, reference = way.make(folder)
    before = listed(folder)
    overspill.adopt(model)
    assert_right(model, reference)
    for net in (model, reference):
        edit(net)
    assert_right(model, reference)
    assert_same_state(model, reference)
    if on_disk(model):
        overspill.restore(model)
    assert_ordinary(model, reference)
    assert listed(folder) == before


def test_a_state_that_is_loaded_into_an_adopted_model_is_kept(way: Way, folder: Path):
    model, reference = way.make(folder)
    before = listed(folder)
    overspill.adopt(model)
    assert_right(model, reference)
    other = Model(way.tied).state_dict()
    for net in (model, reference):
        assert str(net.load_state_dict(other)) == "<All keys matched successfully>"
    assert_right(model, reference)
    assert_same_state(model, reference)
    assert listed(folder) == before


def test_more_of_an_adopted_model_is_offloaded_and_restored(folder: Path, tmp_path: Path, moved: Counter[str]):
    model, reference = WAYS["dispatch_model"].make(folder)
    before = listed(folder)
    overspill.adopt(model)
    adopted = on_disk(model)
    done = overspill.offload(model, to="disk", modules=["blocks.0", "blocks.1"], folder=tmp_path / "more", min_bytes=0)
    assert on_disk(model) > adopted
    assert {path.is_relative_to(tmp_path / "more") for path in done.files} == {True}
    moved.clear()
    assert_right(model, reference)
    assert moved["disk"] >= bytes_of(model, on_disk(model))
    overspill.restore(model, modules="blocks.1", delete=True)
    assert_right(model, reference)
    overspill.restore(model, delete=True)
    assert_ordinary(model, reference)
    assert listed(folder) == before
    assert listed(tmp_path / "more") == {}


@pytest.mark.parametrize("there", ["disk", "cpu"])
def test_what_was_adopted_goes_to_another_tier_and_back(there: str, folder: Path, moved: Counter[str]):
    model, reference = WAYS["disk_offload"].make(folder)
    before = listed(folder)
    overspill.adopt(model, placed(overspill.plan(model, {}, device="cpu"), there))
    overspill.offload(model, to="disk" if there == "cpu" else "cpu", modules="blocks.2")
    other = on_disk(model) if there == "cpu" else on_host(model)
    assert other >= {"blocks.2.up.weight", "blocks.2.down.weight"}
    moved.clear()
    assert_right(model, reference)
    assert min(moved["cpu"], moved["disk"]) > 0
    overspill.restore(model)
    assert_ordinary(model, reference)
    assert listed(folder) == before


def test_copies_of_an_adopted_model_are_ordinary(folder: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    overspill.adopt(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert on_disk(copied) == set()
        assert_same_state(copied, reference)
        assert_right(copied, reference)
    assert on_disk(model)


def test_a_file_that_is_gone_later_is_named_by_the_call_that_needs_it(folder: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    overspill.adopt(model)
    file, aside = folder / "blocks.1.up.weight.dat", folder.parent / "aside"
    file.rename(aside)
    with pytest.raises(CheckpointReadError, match=r"blocks\.1\.up\.weight\.dat"), torch.no_grad():
        model(IDS)
    aside.rename(file)
    assert_right(model, reference)


# ---------------------------------------------------------------- refused, and nothing changed


def test_a_second_adoption_is_refused(folder: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    overspill.adopt(model)
    with pytest.raises(StateError, match="managed by overspill already"):
        overspill.adopt(model)
    assert_right(model, reference)
    assert on_disk(model)


def test_a_model_without_hooks_is_refused():
    reference = Model()
    model = copy.deepcopy(reference)
    before = everything_about(model)
    with pytest.raises(StateError, match=r"no hooks of Accelerate's.*overspill\.offload"):
        overspill.adopt(model)
    assert everything_about(model) == before
    assert_ordinary(model, reference)


def test_a_model_that_moves_as_a_whole_is_refused():
    model, _ = accelerate.cpu_offload_with_hook(Model(), "cpu")
    before = everything_about(model)
    for verb in (overspill.adopt, overspill.restore):
        with pytest.raises(StateError, match=r"CpuOffload.*remove\(\)"):
            verb(model)
        assert everything_about(model) == before


@pytest.mark.parametrize("verb", [overspill.adopt, overspill.restore])
def test_inside_a_running_forward_it_is_refused(verb: Any, folder: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    calls: list[str] = []

    def meddle(module: nn.Module, args: Any) -> None:
        with pytest.raises(StateError, match="while a forward of it is running"):
            verb(model)
        calls.append("refused")

    handle = model.blocks[1].register_forward_pre_hook(meddle)
    untouched = Untouched(model, reference, folder)
    untouched.check()
    assert calls == ["refused", "refused"]
    handle.remove()
    overspill.adopt(model)
    assert_right(model, reference)


def test_files_of_the_dispatch_that_are_gone_or_cut_short_are_named(folder: Path, scratch: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    file, untouched = folder / "blocks.1.up.weight.dat", Untouched(model, reference, folder, scratch)
    content, aside = file.read_bytes(), folder.parent / "aside"
    file.rename(aside)
    with pytest.raises(CheckpointNotFoundError, match=r"blocks\.1\.up\.weight\.dat is gone"):
        overspill.adopt(model)
    about = aside.stat()
    aside.rename(file)
    untouched.check()
    untouched = Untouched(model, reference, folder, scratch)
    file.write_bytes(content[:-4])
    with pytest.raises(CheckpointCorruptError, match=r"blocks\.1\.up\.weight\.dat has 8188 bytes"):
        overspill.adopt(model)
    file.write_bytes(content)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    untouched.check()
    overspill.adopt(model)
    assert_right(model, reference)


def test_a_shard_that_is_gone_is_named(checkpoints: dict[str, Checkpoint], folder: Path, tmp_path: Path):
    checkpoint = checkpoints["llama"]
    reference, model = checkpoint.resident(), checkpoint.dispatched(LLAMA_TIERS, folder)
    before = everything_about(model)
    shard = Path(model.lm_head._hf_hook.weights_map.dataset.index["lm_head.weight"]["safetensors_file"])
    shard.rename(tmp_path / "aside")
    try:
        with pytest.raises(CheckpointNotFoundError, match=shard.name):
            overspill.adopt(model)
    finally:
        (tmp_path / "aside").rename(shard)
    assert everything_about(model) == before
    assert torch.equal(logits(model), logits(reference))


class _Stopped(BaseException):
    """What an impatient user presses."""


@pytest.fixture(params=["stage", "stage_plain", "written", "commit"])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Adoption comes to an end at one of its steps."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise _Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Mover, request.param, fail)
        yield patch


def test_a_failure_in_the_middle_gives_the_model_back_to_accelerate(
    failing: pytest.MonkeyPatch, way: Way, folder: Path, scratch: Path
):
    model, reference = way.make(folder)
    untouched = Untouched(model, reference, folder, scratch)
    with pytest.raises(_Stopped):
        overspill.adopt(model)
    assert list(scratch.iterdir()) == []
    untouched.check()
    failing.undo()
    overspill.adopt(model)
    assert_free_of_accelerate(model)
    assert_right(model, reference)
    assert_same_state(model, reference)


def test_a_failure_after_files_were_written_leaves_none(
    failing: pytest.MonkeyPatch, checkpoints: dict[str, Checkpoint], folder: Path, scratch: Path
):
    checkpoint = checkpoints["t5"]
    reference = checkpoint.resident(dtype=torch.float16)
    model = checkpoint.dispatched(T5_TIERS, folder, dtype=torch.float16)
    before = everything_about(model)
    with pytest.raises(_Stopped):
        overspill.adopt(model)
    assert list(scratch.iterdir()) == []
    assert everything_about(model) == before
    failing.undo()
    overspill.adopt(model)
    assert torch.equal(logits(model), logits(reference))


def test_a_disk_that_is_full_leaves_the_model_with_accelerate(
    folder: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(self: OffloadRoot, nbytes: int) -> None:
        raise OffloadFolderError("no space is left")

    model, reference = WAYS["cpu_offload"].make(folder)
    plan, untouched = overspill.plan(model, {}, device="cpu"), Untouched(model, reference, scratch)
    with monkeypatch.context() as patch:
        patch.setattr(OffloadRoot, "_require_space", full)
        with pytest.raises(OffloadFolderError, match="no space is left"):
            overspill.adopt(model, plan)
    assert list(scratch.iterdir()) == []
    untouched.check()
    overspill.adopt(model, plan)
    assert_right(model, reference)


def test_of_two_threads_that_adopt_one_model_one_succeeds(folder: Path):
    model, reference = WAYS["disk_offload"].make(folder)
    barrier, results = threading.Barrier(4), Counter[str]()
    lock = threading.Lock()

    def adopt() -> None:
        barrier.wait()
        try:
            overspill.adopt(model)
            result = "adopted"
        except StateError:
            result = "refused"
        with lock:
            results[result] += 1

    threads = [threading.Thread(target=adopt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"adopted": 1, "refused": 3}
    assert_right(model, reference)
    assert_same_state(model, reference)


# ---------------------------------------------------------------- on a GPU

CUDA = torch.device("cuda:0")
MIB = 1 << 20


def wide_llama() -> Any:
    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 2048}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("wide"), wide_llama()
    model.save_pretrained(folder, max_shard_size="8MB")
    return Checkpoint(type(model), folder)


def budget(beside: str, on_device: int = 24 * MIB) -> dict[int | str, Any]:
    """Some of the wide model on the device, the rest in host memory or on disk."""
    return {0: on_device, "cpu": "1GiB"} if beside == "cpu" else {0: on_device}


def resident_on_gpu(wide: Checkpoint, model: Any, **options: Any) -> Any:
    """The model that `model` is, wholly on the device."""
    reference = wide.resident(device_map={"": 0}, **options)
    for buffer, same in zip(reference.buffers(), model.buffers(), strict=True):
        buffer.copy_(same)  # what Transformers computes anew has other last bits on another device
    return reference


def on_gpu(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS.cuda()).logits
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("beside", ["cpu", "disk"])
def test_an_automatic_device_map_is_adopted(beside: str, wide: Checkpoint, folder: Path, moved: Counter[str]):
    total = sum(p.nbytes for p in wide_llama().parameters())
    model = wide.dispatched("auto", folder, max_memory=budget(beside, total // 2))
    reference = resident_on_gpu(wide, model)
    device_map = dict(model.hf_device_map)
    assert set(device_map.values()) == {0, beside}
    before = listed(wide.folder, folder)
    overspill.adopt(model)
    assert_free_of_accelerate(model)
    assert model.hf_device_map == device_map
    away = on_host(model) if beside == "cpu" else on_disk(model)
    assert away
    assert away == on_host(model) | on_disk(model)
    assert bytes_of(model, away) >= 0.4 * total
    moved.clear()
    for _ in range(3):
        assert torch.equal(on_gpu(model), on_gpu(reference))
    assert moved[beside] >= bytes_of(model, away)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS.cuda(), **options), reference.generate(IDS.cuda(), **options))
    assert listed(wide.folder, folder) == before


@pytest.mark.gpu
def test_weights_in_host_memory_end_up_pinned(wide: Checkpoint, folder: Path):
    model = wide.dispatched("auto", folder, max_memory=budget("cpu"))
    overspill.adopt(model)
    homes = {name: tensor for name, tensor in named_tensors(model) if isinstance(tensor, HostTensor)}
    assert bytes_of(model, set(homes)) > 24 * MIB
    assert {name for name, home in homes.items() if not home.is_pinned()} == set()


@pytest.mark.gpu
@pytest.mark.parametrize("beside", ["cpu", "disk"])
def test_device_memory_is_what_is_resident_and_the_window(beside: str, wide: Checkpoint, folder: Path):
    gc.collect()
    torch.accelerator.synchronize()
    base = torch.cuda.memory_allocated()
    model = wide.dispatched("auto", folder, max_memory=budget(beside))
    overspill.adopt(model)
    manager = managed(model)
    assert manager is not None
    resident = sum(tensor.nbytes for _, tensor in named_tensors(model) if type(tensor) is nn.Parameter)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        on_gpu(model)
    torch.accelerator.synchronize()
    activations = 4 * MIB + 64 * MIB  # with cuBLAS's workspace
    most = torch.cuda.max_memory_allocated() - base
    assert resident < most <= manager.plan.bytes_on(CUDA) + activations
    assert manager.plan.window <= 2 * bytes_of(model, on_host(model) | on_disk(model))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
def test_a_model_that_is_offloaded_as_a_whole_computes_on_the_gpu(way: str, folder: Path, moved: Counter[str]):
    reference = aligned(wide_llama()).eval()
    model: Any = copy.deepcopy(reference)
    memory = {name: p.data_ptr() for name, p in model.named_parameters() if p.nbytes >= MIB}
    assert len(memory) >= 12
    if way == "cpu_offload":
        accelerate.cpu_offload(model, execution_device=0)
    else:
        accelerate.disk_offload(model, folder, execution_device=0)
    before = listed(folder)
    reference.cuda()
    overspill.adopt(model)
    away = on_host(model) | on_disk(model)
    assert away >= memory.keys()
    if way == "cpu_offload":
        assert on_disk(model) == set()
        assert on_host(model) >= memory.keys()
    tier = "cpu" if way == "cpu_offload" else "disk"
    moved.clear()
    for _ in range(3):
        assert torch.equal(on_gpu(model), on_gpu(reference))
    assert moved[tier] >= bytes_of(reference, away)
    for net in (model, reference):
        with torch.no_grad():
            net.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(0.5)
    assert torch.equal(on_gpu(model), on_gpu(reference))
    assert listed(folder) == before


@pytest.mark.gpu
@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "dispatched"])
@pytest.mark.parametrize("beside", ["cpu", "disk"])
def test_a_model_is_restored_to_the_gpu(beside: str, adopted: bool, wide: Checkpoint, folder: Path):
    eager = {"attn_implementation": "eager"}  # whose backward adds up in one order only
    model = wide.dispatched("auto", folder, max_memory=budget(beside), **eager)
    reference = resident_on_gpu(wide, model, **eager)
    if adopted:
        overspill.adopt(model)
        assert torch.equal(on_gpu(model), on_gpu(reference))
    overspill.restore(model)
    assert {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())} == {CUDA}
    assert_plain(model, reference)
    assert torch.equal(on_gpu(model), on_gpu(reference))
    for net in (model, reference):
        net(input_ids=IDS.cuda(), labels=IDS.cuda()).loss.backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.gpu
def test_a_dispatched_model_is_restored_to_host_memory(wide: Checkpoint, folder: Path):
    reference = wide.resident()
    model = wide.dispatched("auto", folder, max_memory=budget("cpu"))
    overspill.restore(model, device="cpu")
    assert {type(tensor) for tensor in model.parameters()} == {nn.Parameter}
    assert {tensor.device.type for _, tensor in named_tensors(model)} == {"cpu"}
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [Tier.CPU, Tier.DISK])
def test_a_dispatched_net_streams_to_the_gpu_from_where_a_plan_says(tier: Tier, folder: Path, moved: Counter[str]):
    reference = Model()
    model = accelerate.cpu_offload(copy.deepcopy(reference), execution_device=0)
    overspill.adopt(model, placed(narrow(overspill.plan(model, {}, device=0)), tier.value))
    reference.cuda()
    moved.clear()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(IDS), run(reference, IDS))
    assert moved[tier.value] >= bytes_of(reference, {n for n, _ in reference.named_parameters() if is_block(n)})
