"""What Accelerate made of a model is read back tensor by tensor, bit by bit, and taken off without a trace."""

import copy
import dataclasses
import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as hf
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_submodules,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from overspill.checkpoint.reader import FileReader
from overspill.devices import buffer_of
from overspill.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    StateError,
)
from overspill.integrations.accelerate import (
    Dispatch,
    Dispatched,
    execution_device,
    is_dispatched,
    read_dispatch,
    remove_dispatch,
)
from overspill.tensors import tensor_groups

CPU = torch.device("cpu")


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


# Models, and what is known of them before Accelerate gets them.


class Leaf(nn.Module):
    """Tensors of every kind: of no dimension, of many dtypes, transposed, shared by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.scalar = nn.Parameter(torch.randn(()))
        self.brain = nn.Parameter(torch.randn(5, 3).bfloat16(), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(7, 4).t())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("passing", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.t() @ self.weight + self.transposed.sum() + self.brain.float().sum()
        return y * self.scalar + self.wide.float().sum() + self.count + self.passing.sum()


class Tree(nn.Module):
    """Leaves at several depths, and tensors of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Leaf()
        self.inner = nn.ModuleDict({"left": Leaf(), "right": Leaf()})
        self.last = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        nn.init.uniform_(self.norm.running_mean)
        self.offset = nn.Parameter(torch.randn(4))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner["right"](self.inner["left"](self.first(x)))
        return self.norm(self.last(x)) + self.offset


class Tied(nn.Module):
    """Two pairs of tied tensors of one shape and one of another, in four modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)
        self.positions = nn.Embedding(8, 4)
        self.tail = nn.Linear(4, 8)
        self.head.weight = self.embed.weight
        self.tail.weight = self.positions.weight
        self.tail.bias = self.head.bias

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)) + self.tail(self.positions(ids))


TIES = [["embed.weight", "head.weight"], ["head.bias", "tail.bias"], ["positions.weight", "tail.weight"]]

IDS = torch.tensor([[3, 1, 4, 1, 5]])
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "num_hidden_layers": 3, "max_position_embeddings": 16}


def llama(**options: Any) -> hf.LlamaForCausalLM:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **options)).eval()


def t5() -> hf.T5ForConditionalGeneration:
    options = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**options)).eval()


def gpt2() -> hf.GPT2LMHeadModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=16)).eval()


def mixtral() -> hf.MixtralForCausalLM:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)).eval()


THREE_TIERS = {
    "model.embed_tokens": GPU,
    "model.rotary_emb": GPU,
    "model.layers.0": GPU,
    "model.layers.1": "cpu",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "lm_head": "disk",
}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of everything at every path, buffers that are not saved among it."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def read(dispatched: Dispatched, shape: torch.Size) -> torch.Tensor:
    """The values, in the dtype that the model computes with."""
    if dispatched.tensor is not None:
        assert dispatched.spans == ()
        assert dispatched.tensor.dtype == dispatched.stored_dtype
        return dispatched.tensor.detach().to(dispatched.dtype)
    memory = torch.empty(shape, dtype=dispatched.stored_dtype)
    assert sum(span.nbytes for span in dispatched.spans) == memory.nbytes
    reader, target = FileReader(), buffer_of(memory)
    for span in dispatched.spans:
        reader.read(span.file, span.offset, target[: span.nbytes])
        target = target[span.nbytes :]
    return memory.to(dispatched.dtype)


def assert_same_bits(model: nn.Module, originals: Mapping[str, torch.Tensor]) -> Dispatch:
    """Every tensor that `model` shows is found, with the values and dtype of its original."""
    dispatch = read_dispatch(model)
    groups = tensor_groups(model)
    assert list(dispatch) == list(groups)
    for name, group in groups.items():
        values = read(dispatch[name], group.tensor.shape)
        assert dispatch[name].name == name
        for path in group.names:
            original = originals[path]
            assert values.dtype == original.dtype, path
            assert values.shape == original.shape, path
            assert torch.equal(values.contiguous().view(-1).view(torch.uint8), flat_bytes(original)), path
    return dispatch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def tiers(dispatch: Dispatch) -> dict[str, str]:
    return {name: dispatched.where for name, dispatched in dispatch.items()}


# Each way to dispatch a model that is in memory.


def by_cpu_offload(model: nn.Module, folder: Path, **options: Any) -> Any:
    return accelerate.cpu_offload(model, **options)


def by_disk_offload(model: nn.Module, folder: Path, **options: Any) -> Any:
    return accelerate.disk_offload(model, folder / "offload", **options)


def by_dispatch(model: nn.Module, folder: Path, device_map: Any = None, **options: Any) -> Any:
    if device_map is None:
        device_map = {"first": GPU, "inner.left": "cpu", "inner.right": "disk", "last": "disk"}
        device_map |= {"norm": "disk", "offset": "cpu"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")  # offset
        return accelerate.dispatch_model(model, device_map, offload_dir=folder / "offload", **options)


WAYS = [by_cpu_offload, by_disk_offload, by_dispatch]


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_is_found_with_the_bits_it_had(way: Any, offload_buffers: bool, tmp_path: Path):
    model = Tree()
    originals = tensors_of(model)
    assert not is_dispatched(model)
    way(model, tmp_path, offload_buffers=offload_buffers)
    assert is_dispatched(model)
    assert_same_bits(model, originals)
    model(X)
    assert_same_bits(model, originals)


def test_each_tensor_is_on_the_tier_that_the_device_map_gave_it(tmp_path: Path):
    dispatch = read_dispatch(by_dispatch(Tree(), tmp_path))
    where = tiers(dispatch)
    assert where["first.weight"] == where["first.count"] == "device"
    assert where["inner.left.weight"] == where["inner.left.brain"] == "cpu"
    assert where["inner.right.scalar"] == where["last.bias"] == "disk"
    assert where["inner.left.mask"] == where["norm.running_mean"] == "device"  # buffers are not offloaded


def test_buffers_are_offloaded_where_they_were_asked_to_be(tmp_path: Path):
    where = tiers(read_dispatch(by_dispatch(Tree(), tmp_path, offload_buffers=True)))
    assert where["inner.left.mask"] == "cpu"
    assert where["norm.running_mean"] == where["inner.right.count"] == "disk"
    assert where["inner.right.passing"] == "device"  # nobody saves it, so Accelerate cannot offload it


def test_where_the_cpu_computes_what_is_mapped_to_it_is_on_the_device(tmp_path: Path):
    model = Tree()
    originals = tensors_of(model)
    by_dispatch(model, tmp_path, {"first": "cpu", "inner": "disk", "last": "cpu", "norm": "disk", "offset": "cpu"})
    where = tiers(assert_same_bits(model, originals))
    assert where["first.weight"] == where["offset"] == "device"
    assert where["inner.left.weight"] == "disk"


def test_a_brain_float_of_a_dat_file_is_not_taken_for_the_integers_that_numpy_wrote(tmp_path: Path):
    dispatched = read_dispatch(by_disk_offload(Tree(), tmp_path))["first.brain"]
    assert (dispatched.stored_dtype, dispatched.dtype) == (torch.bfloat16, torch.bfloat16)
    assert dispatched.spans[0].file.path == tmp_path / "offload" / "first.brain.dat"
    assert dispatched.spans[0].nbytes == dispatched.spans[0].file.size == 5 * 3 * 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64, torch.float16])
def test_other_dtypes_come_back_from_dat_files(dtype: torch.dtype, tmp_path: Path):
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter((10 * model.weight.detach()).to(dtype), requires_grad=False)
    originals = tensors_of(model)
    assert_same_bits(by_disk_offload(model, tmp_path), originals)


def test_an_empty_tensor_is_no_corrupt_file(tmp_path: Path):
    model = nn.Linear(3, 4)
    model.empty = nn.Parameter(torch.empty(0, 3))
    originals = tensors_of(model)
    dispatch = assert_same_bits(by_disk_offload(model, tmp_path), originals)
    assert dispatch["empty"].spans[0].nbytes == 0


def test_host_values_are_the_very_memory_of_the_weights_map():
    model = Tree()
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    accelerate.cpu_offload(model)
    for name, dispatched in read_dispatch(model).items():
        if name in addresses:
            assert dispatched.tensor is not None
            assert dispatched.tensor.data_ptr() == addresses[name]


def test_device_values_are_the_very_tensors_of_the_modules(tmp_path: Path):
    model = by_dispatch(Tree(), tmp_path)
    dispatch = read_dispatch(model)
    assert dispatch["first.weight"].tensor is model.first.weight
    assert dispatch["norm.running_var"].tensor is model.norm.running_var


def test_weights_in_another_dtype_than_the_model_say_so():
    model = Tree()
    originals = tensors_of(model)
    accelerate.cpu_offload(model)
    model.half()
    dispatched = read_dispatch(model)["last.weight"]
    assert (dispatched.stored_dtype, dispatched.dtype) == (torch.float32, torch.float16)
    assert torch.equal(read(dispatched, torch.Size((4, 4))), originals["last.weight"].half())


def test_buffers_that_nobody_saves_are_read_where_they_are():
    model = Leaf()
    attach_align_device_hook(model, execution_device=CPU, offload=True, offload_buffers=True)
    assert "passing" in model._hf_hook.weights_map  # though no call will look at it
    model.passing = torch.randn(3)
    assert read_dispatch(model)["passing"].tensor is model.passing


def test_of_two_hooks_that_offload_one_tensor_the_inner_one_counts():
    model = nn.Sequential(nn.Linear(4, 4))
    inner = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    add_hook_to_module(model, AlignDevicesHook(CPU, offload=True, place_submodules=True))
    add_hook_to_module(model[0], AlignDevicesHook(CPU, offload=True, weights_map=inner))
    assert torch.equal(model(X), nn.functional.linear(X, inner["weight"], inner["bias"]))
    assert read_dispatch(model)["0.weight"].tensor is inner["weight"]


def test_a_module_that_loads_all_that_is_in_it_at_once_is_read_too(tmp_path: Path):
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)
            self.deep = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.deep(x), self.part.weight, self.part.bias)

    model = nn.Sequential(Whole(), nn.Linear(4, 4)).eval()
    originals = tensors_of(model)
    by_disk_offload(model, tmp_path, preload_module_classes=["Whole"], offload_buffers=True)
    assert model[0]._hf_hook.place_submodules
    where = tiers(assert_same_bits(model, originals))
    assert where["0.deep.0.weight"] == where["0.deep.1.running_mean"] == "disk"


def test_what_an_interrupted_call_left_behind_does_not_count():
    model = Tree()
    originals = tensors_of(model)
    accelerate.cpu_offload(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 3))
    assert not model.first.weight.is_meta
    with torch.no_grad():
        model.first.weight = nn.Parameter(torch.zeros_like(model.first.weight))
    assert tiers(assert_same_bits(model, originals))["first.weight"] == "cpu"


def test_a_tensor_that_was_added_after_the_dispatch_is_read_where_it_is(tmp_path: Path):
    model = by_dispatch(Tree(), tmp_path)
    model.last.extra = nn.Parameter(torch.randn(3))
    assert read_dispatch(model)["last.extra"].tensor is model.last.extra


def test_weights_are_found_by_the_names_they_had_before_adapters_were_put_around_them(tmp_path: Path):
    base = llama()
    originals = tensors_of(base)
    by_dispatch(base, tmp_path, THREE_TIERS)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2))
    path = "base_model.model.model.layers.2.self_attn.q_proj"
    with pytest.raises(StateError, match=rf"{path}.lora_B.default.weight: on the meta device.* after it was adopted"):
        read_dispatch(model)  # PEFT makes adapters where it finds the weights
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if name == "weight" and parameter.is_meta and not is_dispatched(layer):
                layer.weight = nn.Parameter(torch.randn(parameter.shape))
    dispatch = read_dispatch(model)
    assert dispatch[f"{path}.base_layer.weight"].where == "disk"
    values = read(dispatch[f"{path}.base_layer.weight"], torch.Size((16, 16)))
    assert torch.equal(values, originals["model.layers.2.self_attn.q_proj.weight"])
    assert dispatch[f"{path}.lora_A.default.weight"].where == "device"


def test_reading_changes_nothing_and_reads_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = by_dispatch(Tree(), tmp_path)
    before = everything_about(model)

    def refuse(*args: Any) -> None:
        raise AssertionError("values were read")

    monkeypatch.setattr(FileReader, "read", refuse)
    monkeypatch.setattr(accelerate.utils.offload.OffloadedWeightsLoader, "__getitem__", refuse)
    read_dispatch(model)
    assert everything_about(model) == before


def everything_about(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What each module holds, tensors by identity."""
    about = {}
    for path, module in model.named_modules():
        tables = {"parameters": module._parameters, "buffers": module._buffers}
        tensors = {f"{kind} {name}": id(tensor) for kind, table in tables.items() for name, tensor in table.items()}
        rest = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers")}
        hook = vars(module).get("_hf_hook")
        about[path] = {**tensors, **rest, "hook": dict(vars(hook)) if hook else None}
    return about


# Execution devices.


def test_the_execution_device_is_that_of_the_first_module_with_tensors(tmp_path: Path):
    model = by_dispatch(Tree(), tmp_path)
    assert execution_device(model) == CPU
    assert {dispatched.execution_device for dispatched in read_dispatch(model).values()} == {CPU}
    assert execution_device(nn.Linear(2, 2, device="meta")) == CPU
    assert execution_device(nn.Identity()) == CPU


def test_modules_compute_where_their_hook_or_the_nearest_above_sends_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("overspill.integrations.accelerate.compute_device", torch.device)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    add_hook_to_module(model[1], AlignDevicesHook())
    model._hf_hook.execution_device = "cuda:1"
    model[1]._hf_hook.execution_device = torch.device("cuda", 3)
    dispatch = read_dispatch(model)
    assert execution_device(model) == torch.device("cuda:1")
    assert dispatch["0.0.weight"].execution_device == torch.device("cuda:1")
    assert dispatch["1.0.weight"].execution_device == torch.device("cuda:3")
    assert dispatch["0.0.weight"].where == "cpu"  # it is not where its module computes


def test_tied_tensors_compute_each_at_its_own_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("overspill.integrations.accelerate.compute_device", torch.device)
    model = accelerate.cpu_offload(Tied())
    model.embed._hf_hook.execution_device, model.head._hf_hook.execution_device = "cuda:1", "cuda:2"
    dispatch = read_dispatch(model)
    assert dispatch.ties == TIES
    assert dispatch["embed.weight"].execution_device == torch.device("cuda:1")
    assert dispatch["head.weight"].execution_device == torch.device("cuda:2")


# Checkpoints.


def skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    with accelerate.init_empty_weights():
        return build()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_load_checkpoint_and_dispatch(dtype: torch.dtype | None, offload_buffers: bool, tmp_path: Path):
    original = llama()
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    model = skeleton(llama)
    accelerate.load_checkpoint_and_dispatch(
        model,
        tmp_path,
        THREE_TIERS,
        offload_folder=tmp_path / "offload",
        offload_buffers=offload_buffers,
        dtype=dtype,
    )
    names = dict(original.named_parameters())
    originals = tensors_of(original)
    cast = {name: tensor.to(dtype) if dtype and name in names else tensor for name, tensor in originals.items()}
    where = tiers(assert_same_bits(model, cast))
    assert where["model.layers.1.mlp.up_proj.weight"] == "cpu"
    assert where["model.layers.2.mlp.up_proj.weight"] == where["lm_head.weight"] == "disk"
    on_disk = read_dispatch(model)["lm_head.weight"]
    assert on_disk.stored_dtype == torch.float32  # Accelerate writes what it reads, and casts at each call


def from_pretrained(build: Callable[[], Any], folder: Path, device_map: Any, **options: Any) -> tuple[Any, Any]:
    """The model as Transformers dispatches it from a sharded checkpoint, and as it loads it without offloading."""
    model = build()
    if not (folder / "config.json").exists():
        model.save_pretrained(folder, max_shard_size="10KB")
    resident = type(model).from_pretrained(folder, **options)
    dispatched = type(model).from_pretrained(
        folder, device_map=device_map, offload_folder=folder / "offload", **options
    )
    return dispatched, resident


def test_transformers_disk_tier_is_the_original_checkpoint(tmp_path: Path):
    model, resident = from_pretrained(llama, tmp_path, THREE_TIERS)
    dispatch = assert_same_bits(model, tensors_of(resident))
    where = tiers(dispatch)
    assert where["model.layers.0.mlp.up_proj.weight"] == "device"
    assert where["model.layers.1.mlp.up_proj.weight"] == where["model.norm.weight"] == "cpu"
    on_disk = dispatch["model.layers.2.mlp.up_proj.weight"].spans[0]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert on_disk.file.path == tmp_path / index["model.layers.2.mlp.up_proj.weight"]
    assert on_disk.offset > 0


def test_a_cast_that_transformers_makes_at_each_call_is_seen(tmp_path: Path):
    model, resident = from_pretrained(llama, tmp_path, THREE_TIERS, dtype=torch.bfloat16)
    dispatch = assert_same_bits(model, tensors_of(resident))
    on_disk, on_host = dispatch["lm_head.weight"], dispatch["model.norm.weight"]
    assert (on_disk.stored_dtype, on_disk.dtype) == (torch.float32, torch.bfloat16)
    assert (on_host.stored_dtype, on_host.dtype) == (torch.bfloat16, torch.bfloat16)


def test_what_a_model_keeps_in_float32_is_float32_on_every_tier(tmp_path: Path):
    device_map = {"shared": GPU, "encoder": "cpu", "decoder": "disk", "lm_head": GPU}
    model, resident = from_pretrained(t5, tmp_path, device_map, dtype=torch.float16)
    assert resident.decoder.block[0].layer[2].DenseReluDense.wo.weight.dtype == torch.float32
    dispatch = assert_same_bits(model, tensors_of(resident))
    kept, cast = (dispatch[f"decoder.block.0.layer.2.DenseReluDense.{name}.weight"] for name in ("wo", "wi"))
    assert (kept.where, kept.dtype) == ("disk", torch.float32)
    assert (cast.where, cast.dtype) == ("disk", torch.float16)


def test_what_the_user_made_half_in_memory_stays_half(tmp_path: Path):
    model = t5().half()
    originals = tensors_of(model)
    dispatch = assert_same_bits(by_disk_offload(model, tmp_path), originals)
    assert dispatch["decoder.block.0.layer.2.DenseReluDense.wo.weight"].dtype == torch.float16


def test_fused_experts_are_found_in_the_files_that_transformers_made_of_them(tmp_path: Path):
    model, resident = from_pretrained(mixtral, tmp_path, THREE_TIERS)
    dispatch = assert_same_bits(model, tensors_of(resident))
    fused = [d for d in dispatch.values() if d.where == "disk" and d.spans[0].file.path.parent.name == "offload"]
    assert [dispatched.name for dispatched in fused] == [
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
    ]


def test_a_checkpoint_of_pickles_is_found_in_the_files_that_replace_it(tmp_path: Path):
    model = gpt2()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    device_map = {"transformer.wte": GPU, "transformer.wpe": "cpu", "transformer.h": "disk", "transformer.ln_f": GPU}
    dispatched, resident = from_pretrained(gpt2, tmp_path, {**device_map, "lm_head": GPU})
    dispatch = assert_same_bits(dispatched, tensors_of(resident))
    assert dispatch["transformer.h.0.attn.c_attn.weight"].spans[0].file.path.parent == tmp_path / "offload"


def test_buffers_of_a_checkpoint_on_disk(tmp_path: Path):
    def resnet() -> hf.ResNetForImageClassification:
        config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
        model = hf.ResNetForImageClassification(config)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                nn.init.uniform_(buffer)
        return model

    device_map = {"resnet.embedder": GPU, "resnet.encoder": "disk", "resnet.pooler": GPU, "classifier": "cpu"}
    for offload_buffers, tier in ((False, "device"), (True, "disk")):
        model, resident = from_pretrained(resnet, tmp_path, device_map, offload_buffers=offload_buffers)
        where = tiers(assert_same_bits(model, tensors_of(resident)))
        assert where["resnet.encoder.stages.0.layers.0.layer.0.normalization.running_mean"] == tier
        assert where["resnet.encoder.stages.0.layers.0.layer.0.convolution.weight"] == "disk"


# Ties.


def places(model: nn.Module, dispatch: Dispatch, path: str) -> set[str]:
    """Every path that shows the same tensor as `path`: those that still do, and those that did."""
    shown = next(set(group.names) for group in tensor_groups(model).values() if path in group.names)
    return shown.union(*(tie for tie in dispatch.ties if shown & set(tie)))


@pytest.mark.parametrize(
    ("embedding", "head", "nearest", "runs"),
    [
        pytest.param(GPU, GPU, "device", True, id="gpu-gpu"),
        pytest.param(GPU, "cpu", "device", True, id="gpu-cpu"),
        pytest.param(GPU, "disk", "device", False, id="gpu-disk"),
        pytest.param("cpu", GPU, "device", True, id="cpu-gpu"),
        pytest.param("cpu", "cpu", "cpu", True, id="cpu-cpu"),
        pytest.param("cpu", "disk", "cpu", False, id="cpu-disk"),
        pytest.param("disk", "cpu", "disk", False, id="disk-cpu"),
        pytest.param("disk", "disk", "disk", True, id="disk-disk"),
    ],
)
def test_the_tied_embedding_of_a_checkpoint_is_one_tensor(
    embedding: Any, head: Any, nearest: str, runs: bool, tmp_path: Path
):
    device_map = {**THREE_TIERS, "model.embed_tokens": embedding, "lm_head": head}
    model, resident = from_pretrained(functools.partial(llama, tie_word_embeddings=True), tmp_path, device_map)
    tied = {"model.embed_tokens.weight", "lm_head.weight"}

    def check() -> None:
        dispatch = assert_same_bits(model, tensors_of(resident))
        assert places(model, dispatch, "lm_head.weight") == tied
        assert {dispatch[name].where for name in tied & set(dispatch)} == {nearest}

    check()
    if runs:
        model(IDS)
        check()
    else:  # Accelerate has lost the head, which we find by its tie
        with pytest.raises((KeyError, NotImplementedError)):
            model(IDS)


def test_a_tie_that_accelerate_moved_to_the_device_and_left_on_the_host_is_known_by_its_bytes(tmp_path: Path):
    device_map = {**THREE_TIERS, "lm_head": "cpu"}
    model, resident = from_pretrained(functools.partial(llama, tie_word_embeddings=True), tmp_path, device_map)
    model(IDS)
    assert model.lm_head.weight.is_meta
    embedding = model.model.embed_tokens
    embedding.weight = nn.Parameter(embedding.weight.detach().clone())  # what a real accelerator has is a copy
    dispatch = assert_same_bits(model, tensors_of(resident))
    assert dispatch.ties == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert dispatch["lm_head.weight"].tensor is embedding.weight
    with torch.no_grad():
        embedding.weight[-1, -1] += 1
    assert read_dispatch(model).ties == []


def test_tensors_that_a_checkpoint_holds_apart_are_not_tied_by_their_config(tmp_path: Path):
    tied = functools.partial(llama, tie_word_embeddings=True)
    tied().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = from_pretrained(tied, tmp_path, {"model": "disk", "lm_head": "disk"})
    assert model.all_tied_weights_keys
    dispatch = read_dispatch(model)
    assert dispatch.ties == []
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(read(dispatch[name], torch.Size((32, 16))), state[name])


T5_EMBEDDING = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}


def test_one_embedding_at_four_places_of_a_checkpoint(tmp_path: Path):
    device_map = {"shared": "disk", "encoder": "disk", "decoder": "disk", "lm_head": "disk"}
    model, resident = from_pretrained(t5, tmp_path, device_map)
    assert places(model, assert_same_bits(model, tensors_of(resident)), "lm_head.weight") == T5_EMBEDDING
    model(IDS, decoder_input_ids=IDS)
    assert model.lm_head.weight is not model.shared.weight
    dispatch = assert_same_bits(model, tensors_of(resident))
    assert places(model, dispatch, "lm_head.weight") == T5_EMBEDDING
    [tie] = dispatch.ties
    assert tie[0] == "shared.weight"


T5_MAP = {"shared": "disk", "encoder.embed_tokens": "disk", "encoder.block": GPU, "encoder.final_layer_norm": GPU}
T5_MAP |= {"decoder": "cpu", "lm_head": "cpu"}


@pytest.mark.parametrize("way", [by_cpu_offload, by_disk_offload, functools.partial(by_dispatch, device_map=T5_MAP)])
def test_one_embedding_at_four_places_in_memory(way: Any, tmp_path: Path):
    model = t5()
    originals = tensors_of(model)
    way(model, tmp_path)
    assert model.lm_head.weight is not model.shared.weight
    dispatch = assert_same_bits(model, originals)
    assert len(dispatch.ties) == 1
    assert set(dispatch.ties[0]) == T5_EMBEDDING
    assert len({dispatch[path].where for path in T5_EMBEDDING & set(dispatch)}) == 1


@pytest.mark.parametrize(("tier", "nearest"), [(GPU, "device"), ("cpu", "cpu"), ("disk", "disk")])
def test_ties_of_any_module_are_found_by_what_its_hooks_know(tier: Any, nearest: str, tmp_path: Path):
    model = Tied()
    originals = tensors_of(model)
    device_map = {"embed": tier, "head": "disk", "positions": tier, "tail": "disk"}
    by_dispatch(model, tmp_path, device_map, main_device=GPU)
    for path, ties in (("head.weight", TIES[0]), ("tail.bias", TIES[1]), ("tail.weight", TIES[2])):
        assert places(model, assert_same_bits(model, originals), path) == set(ties)
    model(IDS)
    dispatch = assert_same_bits(model, originals)
    assert dispatch.ties == TIES
    assert dispatch["tail.weight"].where == nearest
    assert dispatch["tail.weight"].name == "tail.weight"


def test_ties_of_any_module_are_found_in_shared_host_memory():
    model = Tied()
    originals = tensors_of(model)
    accelerate.cpu_offload(model)
    assert model.head.weight is not model.embed.weight
    assert assert_same_bits(model, originals).ties == TIES


def test_what_the_user_untied_on_the_device_stays_apart(tmp_path: Path):
    device_map = {**THREE_TIERS, "lm_head": GPU}
    model, _ = from_pretrained(functools.partial(llama, tie_word_embeddings=True), tmp_path, device_map)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert read_dispatch(model).ties == []


def test_a_tensor_without_values_is_not_what_brings_others_together(tmp_path: Path):
    state = t5().state_dict()
    embedding = state.pop("shared.weight")
    del state["lm_head.weight"]
    state |= {"encoder.embed_tokens.weight": embedding.clone(), "decoder.embed_tokens.weight": embedding + 1}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = skeleton(t5)
    device_map = {"shared": "disk", "encoder.embed_tokens": "disk", "encoder.block": "disk", "lm_head": "disk"}
    device_map |= {"encoder.final_layer_norm": "cpu", "decoder": "disk"}
    accelerate.load_checkpoint_and_dispatch(model, tmp_path, device_map, offload_folder=tmp_path / "offload")
    dispatch = read_dispatch(model)
    for path in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        assert torch.equal(read(dispatch[path], embedding.shape), state[path])
    assert places(model, dispatch, "shared.weight") == T5_EMBEDDING - {"decoder.embed_tokens.weight"}


def test_a_hook_that_knows_of_a_tie_does_not_know_to_what(tmp_path: Path):
    model = Tied()
    by_dispatch(model, tmp_path, dict.fromkeys(("embed", "head", "positions", "tail"), "disk"))
    del model.tail._hf_hook.weights_map.dataset.index["tail.weight"]
    with pytest.raises(StateError, match=r"^tail\.weight: on the meta device"):
        read_dispatch(model)


def test_equal_values_alone_do_not_tie(tmp_path: Path):
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    assert read_dispatch(by_disk_offload(model, tmp_path)).ties == []


def test_a_hook_that_takes_every_tensor_for_tied_is_not_believed(tmp_path: Path):
    model = by_disk_offload(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)), tmp_path)
    for layer in model:  # so do versions before 1.15, for a model that was on the meta device with a tie
        layer._hf_hook.tied_params_map, layer._hf_hook.tied_params_names = {0: {}}, {"weight", "bias"}
    assert read_dispatch(model).ties == []


@pytest.mark.parametrize("view", [lambda whole: whole[:4], lambda whole: whole.view(torch.int32)])
def test_a_view_of_a_tensor_is_not_tied_to_it(view: Any):
    whole = torch.randn(8, 4)
    model = nn.ParameterDict({"whole": nn.Parameter(whole), "view": nn.Parameter(view(whole), requires_grad=False)})
    originals = tensors_of(model)
    assert assert_same_bits(accelerate.cpu_offload(model), originals).ties == []


def test_empty_tensors_do_not_tie():
    model = nn.ParameterDict({"one": torch.empty(0, 4), "other": torch.empty(0, 4)})
    assert read_dispatch(accelerate.cpu_offload(model)).ties == []


def test_a_tensor_that_was_stored_under_its_other_name_is_found_by_its_tie(tmp_path: Path):
    tied = functools.partial(llama, tie_word_embeddings=True)
    original = tied()
    state = original.state_dict()
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = skeleton(tied)
    device_map = {**THREE_TIERS, "model.embed_tokens": "disk"}
    accelerate.load_checkpoint_and_dispatch(model, tmp_path, device_map, offload_folder=tmp_path / "offload")
    dispatch = assert_same_bits(model, tensors_of(original))
    assert places(model, dispatch, "lm_head.weight") == {"model.embed_tokens.weight", "lm_head.weight"}


# What cannot be read.


def test_a_tensor_without_values_is_named(tmp_path: Path):
    state = llama().state_dict()
    del state["model.layers.2.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = skeleton(llama)
    accelerate.load_checkpoint_and_dispatch(model, tmp_path, THREE_TIERS, offload_folder=tmp_path / "offload")
    with pytest.raises(StateError, match=r"^model\.layers\.2\.mlp\.up_proj\.weight: on the meta device"):
        read_dispatch(model)


def test_what_transformers_initialised_and_then_lost_is_named(tmp_path: Path):
    llama().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = from_pretrained(llama, tmp_path, THREE_TIERS)
    with pytest.raises(StateError, match=r"^lm_head\.weight: on the meta device"):
        read_dispatch(model)


def test_a_model_that_moves_as_a_whole_is_refused_by_its_hook():
    model, hook = accelerate.cpu_offload_with_hook(Tree(), "cpu")
    assert is_dispatched(model)
    for verb in (read_dispatch, remove_dispatch):
        with pytest.raises(StateError, match=r"^the model carries Accelerate's CpuOffload.*remove\(\)"):
            verb(model)
    hook.remove()
    assert not is_dispatched(model)


def test_a_model_whose_weights_are_cast_at_each_call_is_refused_by_its_hook():
    model = Tree()
    accelerate.big_modeling.attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    assert is_dispatched(model)
    with pytest.raises(StateError, match=r"^last carries Accelerate's LayerwiseCastingHook.*remove_hook_from_submod"):
        read_dispatch(model)
    remove_hook_from_submodules(model)
    assert not is_dispatched(model)


def test_a_hook_of_another_shape_is_refused_with_the_versions_that_are_known():
    model = accelerate.cpu_offload(nn.Linear(2, 2))
    for hook in model._hf_hook.hooks:
        del hook.weights_map
    with pytest.raises(StateError, match=r"without weights_map.*accelerate 1\.10 to 1\.15"):
        read_dispatch(model)


def test_offloaded_parameters_of_a_class_of_their_own_are_refused_and_resident_ones_are_not(tmp_path: Path):
    class Packed(nn.Parameter):
        pass

    resident, offloaded = Tree(), Tree()
    resident.first.weight = offloaded.inner["left"].weight = Packed(torch.randn(6, 4))
    assert read_dispatch(by_dispatch(resident, tmp_path))["first.weight"].tensor is resident.first.weight
    with pytest.raises(StateError, match=r"inner\.left\.weight is offloaded and a Packed"):
        read_dispatch(by_dispatch(offloaded, tmp_path))


def test_a_weights_map_that_may_be_anything_is_refused():
    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            return torch.zeros(2, 2)

        def __iter__(self) -> Iterator[str]:
            return iter(())

        def __len__(self) -> int:
            return 0

    model = nn.Linear(2, 2)
    attach_align_device_hook(model, execution_device=CPU, offload=True, weights_map=Lazy())
    with pytest.raises(StateError, match="weight is kept in a weights map of type Lazy"):
        read_dispatch(model)


def test_files_that_are_gone_or_of_another_size_are_named(tmp_path: Path):
    model = by_disk_offload(Tree(), tmp_path)
    file = tmp_path / "offload" / "last.weight.dat"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointCorruptError, match=r"last\.weight\.dat has 63 bytes.*float32\[4, 4\], 64 bytes"):
        read_dispatch(model)
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"last\.weight\.dat is gone"):
        read_dispatch(model)


def test_a_folder_that_holds_another_model_is_noticed(tmp_path: Path):
    by_disk_offload(nn.Linear(3, 5), tmp_path)
    model = by_disk_offload(nn.Linear(4, 5), tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"weight is \[5, 4\] in the model and \[5, 3\] in .*weight\.dat"):
        read_dispatch(model)


def test_an_index_with_a_dtype_that_does_not_exist_is_refused(tmp_path: Path):
    model = by_disk_offload(nn.Linear(3, 5), tmp_path)
    model._hf_hook.hooks[-1].weights_map.dataset.index["bias"]["dtype"] = "float31"
    with pytest.raises(CheckpointCorruptError, match="gives bias the dtype 'float31'"):
        read_dispatch(model)


def test_a_checkpoint_that_was_replaced_under_the_model_is_noticed(tmp_path: Path):
    llama().save_pretrained(tmp_path)
    model, _ = from_pretrained(llama, tmp_path, THREE_TIERS)
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match=r"model\.safetensors does not hold lm_head\.weight any more"):
        read_dispatch(model)


def test_a_second_cast_is_refused_where_it_would_round_twice(tmp_path: Path):
    model, _ = from_pretrained(llama, tmp_path, THREE_TIERS, dtype=torch.bfloat16)
    model.float()
    with pytest.raises(
        StateError, match=r"stored as torch\.float32, was loaded as torch\.bfloat16 and cast to torch\.f"
    ):
        read_dispatch(model)


def test_a_second_cast_that_loses_nothing_is_fine(tmp_path: Path):
    llama().bfloat16().save_pretrained(tmp_path)
    model, resident = from_pretrained(llama, tmp_path, THREE_TIERS, dtype=torch.float32)
    originals = tensors_of(resident.half())
    model.half()
    names = dict(resident.named_parameters())
    dispatch = read_dispatch(model)
    for name in names:
        assert torch.equal(read(dispatch[name], originals[name].shape), originals[name])


# Taking it off.


class Doubling(ModelHook):
    """A hook of the user's own."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return 2 * output


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {path: set(vars(module)) for path, module in model.named_modules()}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_accelerate_is_left(way: Any, tmp_path: Path):
    model = Tree()
    plain = attributes(model)
    way(model, tmp_path)
    shown = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    remove_dispatch(model)
    assert not is_dispatched(model)
    left = attributes(model)
    left[""] -= {"hf_device_map"}
    assert left == plain
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == shown
    assert hasattr(model, "hf_device_map") == (way is by_dispatch)
    restored = Tree()
    model.load_state_dict(restored.state_dict(), assign=True)
    model.first.passing, model.inner["left"].passing = restored.first.passing, restored.inner["left"].passing
    model.inner["right"].passing = restored.inner["right"].passing
    assert torch.equal(model(X), restored(X))
    assert model.to("cpu") is model


@pytest.mark.parametrize("way", WAYS)
def test_undo_puts_all_of_it_back(way: Any, tmp_path: Path):
    model = Tree()
    expected = model(X)
    way(model, tmp_path)
    add_hook_to_module(model.last, Doubling(), append=True)
    before = everything_about(model)
    doubled = model(X)
    assert not torch.equal(doubled, expected)
    before = everything_about(model)
    undo = remove_dispatch(model)
    assert everything_about(model) != before
    undo()
    assert everything_about(model) == before
    assert torch.equal(model(X), doubled)
    undo()  # once is enough
    assert torch.equal(model(X), doubled)


def test_a_transformers_model_is_an_ordinary_one_again(tmp_path: Path):
    plain = attributes(llama())
    model, resident = from_pretrained(llama, tmp_path, THREE_TIERS)
    remove_dispatch(model)
    assert {path: left - plain[path] for path, left in attributes(model).items()} == {
        path: attributes(resident)[path] - plain[path] | ({"hf_device_map"} if path == "" else set()) for path in plain
    }
    assert model.hf_device_map == THREE_TIERS
    model.load_state_dict(resident.state_dict(), assign=True)
    assert torch.equal(model(IDS).logits, resident(IDS).logits)


def test_hooks_of_the_user_stay_and_run(tmp_path: Path):
    model = Tree()
    mine, alone = Doubling(), Doubling()
    by_disk_offload(model, tmp_path)
    add_hook_to_module(model.last, SequentialHook(mine, Doubling()), append=True)
    add_hook_to_module(model.inner, alone)
    remove_dispatch(model)
    assert not is_dispatched(model)
    assert model.inner._hf_hook is alone
    assert model.last._hf_hook.hooks[0] is mine
    model.last.weight, model.last.bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4))
    assert torch.equal(model.last(X), 4 * X)


def test_a_forward_that_the_user_wrapped_again_goes_on_working():
    model: Any = accelerate.cpu_offload(Tree())
    inner = model.last.forward
    model.last.forward = lambda x: 3 * inner(x)
    remove_dispatch(model)
    assert not is_dispatched(model)
    model.last.weight, model.last.bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4))
    assert torch.equal(model.last(X), 3 * X)


def test_methods_that_the_user_put_on_an_instance_come_back():
    def forward(x: torch.Tensor) -> torch.Tensor:
        return 5 * x

    def to(*args: Any, **kwargs: Any) -> str:
        return "mine"

    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].forward, model.to = forward, to
    accelerate.dispatch_model(model, {"0": GPU, "1": "cpu"})
    assert model.to is not to
    remove_dispatch(model)
    assert model[0].forward is forward
    assert model.to is to


def test_a_traced_module_gets_its_forward_back():
    model = nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 4))
    forward = type(model[0]).forward
    expected = model(X)
    accelerate.cpu_offload(model)
    add_hook_to_module(model[0], AlignDevicesHook(CPU))
    undo = remove_dispatch(model)
    assert type(model[0]).forward is forward
    undo()
    assert torch.equal(model(X), expected)


def test_a_copy_is_freed_of_its_own_warnings_only(tmp_path: Path):
    model = by_dispatch(Tree(), tmp_path)
    twin = copy.deepcopy(model)
    remove_dispatch(twin)
    assert "to" not in vars(twin)
    assert twin.to.__self__ is twin
    assert is_dispatched(model)


def test_a_model_that_is_compiled_around_its_hooks_is_freed_of_them(tmp_path: Path):
    model = by_dispatch(Tree(), tmp_path)
    compiled: Any = torch.compile(model, backend="eager")
    assert len(read_dispatch(compiled)) == len(read_dispatch(model))
    remove_dispatch(compiled)
    assert not any("_hf_hook" in vars(module) for module in compiled.modules())


def test_an_ordinary_model_has_nothing_to_remove():
    model = Tree()
    before = everything_about(model)
    remove_dispatch(model)()
    assert everything_about(model) == before


def test_a_foreign_hook_does_not_make_a_model_dispatched(monkeypatch: pytest.MonkeyPatch):
    model = add_hook_to_module(nn.Linear(2, 2), Doubling())
    assert not is_dispatched(model)
    monkeypatch.delitem(sys.modules, "accelerate.hooks")  # as where Accelerate was never imported
    assert not is_dispatched(model)


def test_results_are_frozen(tmp_path: Path):
    dispatched: Any = read_dispatch(by_disk_offload(Tree(), tmp_path))["first.weight"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        dispatched.name = "other"
