"""The calls of Accelerate's big-model guide, before and after the import is changed: same outputs, really offloaded."""

import copy
import inspect
import json
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import accelerate.hooks
import accelerate.utils
import pytest
import torch
import transformers as hf
from torch import nn

import overspill.compat.accelerate as compat
from overspill.managed import managed
from overspill.moving import tier_of
from overspill.plan import Tier
from support import aligned, run_program

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class Block(nn.Module):
    """No buffers: Accelerate never loads those of a module on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


BLOCK = (2 * 64 + 2 * 64 * 128 + 128) * 4
"""Bytes of a block."""

BEFORE = types.SimpleNamespace(**{**vars(accelerate.hooks), **vars(accelerate.utils), **vars(accelerate)})


@pytest.fixture(params=[pytest.param(BEFORE, id="before"), pytest.param(compat, id="after")])
def library(request: pytest.FixtureRequest) -> Any:
    """What the names of the guide are imported from."""
    return request.param


@pytest.fixture
def execution_device(device: str) -> str:
    return device


@pytest.fixture
def model(device: str) -> Model:
    return aligned(Model()).eval().to(device)  # type: ignore[return-value]


@pytest.fixture
def twin(model: Model) -> Model:
    return copy.deepcopy(model)


@pytest.fixture
def weights_location(model: Model, tmp_path: Path) -> str:
    """Two shards and an index, as the guide writes them."""
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    names = [*state]
    shards = {"first_state_dict.bin": names[::2], "second_state_dict.bin": names[1::2]}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file, keys in shards.items():
        torch.save({key: state[key].clone() for key in keys}, folder / file)
    index = {key: file for file, keys in shards.items() for key in keys}
    (folder / "model.index.json").write_text(json.dumps(index))
    return str(folder)


def skeleton(library: Any) -> Model:
    with library.init_empty_weights():
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    return model.eval()


def offloaded_bytes(model: nn.Module, tier: Tier) -> int:
    """Bytes of `model` that rest on `tier`, as overspill knows them."""
    return sum(parameter.nbytes for parameter in model.parameters() if tier_of(parameter) is tier)


def assert_right(library: Any, model: nn.Module, twin: nn.Module) -> None:
    """The same output as the plain model's: ours bit by bit, Accelerate's from memory that may not be aligned."""
    ids = IDS.to(next(twin.parameters()).device)
    with torch.no_grad():
        output, expected = model(ids), twin(ids)
    assert torch.equal(output, expected) if library is compat else torch.allclose(output, expected, atol=1e-6)


# ---------------------------------------------------------------- the signatures


@pytest.mark.parametrize("name", compat.__all__)
def test_every_name_takes_what_accelerates_takes(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(place, name)).parameters for place in (compat, BEFORE))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@pytest.mark.parametrize("module", ["big_modeling", "hooks", "utils"])
def test_names_are_in_the_modules_where_accelerate_has_them(module: str) -> None:
    ours = __import__(f"overspill.compat.accelerate.{module}", fromlist=["*"])
    theirs = __import__(f"accelerate.{module}", fromlist=["*"])
    assert [name for name in ours.__all__ if not hasattr(theirs, name)] == []
    assert [name for name in compat.__all__ if hasattr(theirs, name) and name not in ours.__all__] == []


def test_accelerate_need_not_be_installed() -> None:
    program = """
        import sys
        sys.modules["accelerate"] = None  # an import of it fails
        from torch import nn
        from overspill.compat.accelerate import disk_offload, infer_auto_device_map, remove_hook_from_submodules
        import overspill.compat.accelerate.utils, overspill.compat.accelerate.hooks
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        print(infer_auto_device_map(model, max_memory={0: "1MB"}))
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            disk_offload(model, folder)
            remove_hook_from_submodules(model)
    """
    assert run_program(program) == "{'': 0}\n"


# ---------------------------------------------------------------- instantiating an empty model


def test_a_model_of_100_billion_parameters_takes_no_memory(library: Any) -> None:
    with library.init_empty_weights():
        model = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in model.parameters()) > 100e9
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("variable", ["true", "0", None])
def test_buffers_are_empty_where_accelerates_are(
    library: Any, said: bool | None, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_INIT_INCLUDE_BUFFERS", raising=False)
    if variable is not None:
        monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", variable)
    with library.init_empty_weights(include_buffers=said):
        norm = nn.BatchNorm1d(4)
    assert norm.weight.is_meta
    assert norm.running_mean.is_meta == (said if said is not None else variable == "true")


@pytest.mark.parametrize("include_buffers", [True, False])
def test_a_model_is_built_on_a_device(library: Any, device: str, include_buffers: bool) -> None:
    with library.init_on_device(torch.device(device), include_buffers=include_buffers):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert {str(parameter.device) for parameter in model.parameters()} == {device}
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert {str(buffer.device) for buffer in model.buffers()} == {device if include_buffers else "cpu"}


def test_a_model_is_built_on_meta_by_name(library: Any) -> None:
    with library.init_on_device("meta"):
        model = nn.BatchNorm1d(4)
    assert model.weight.is_meta
    assert model.running_mean is not None
    assert not model.running_mean.is_meta


# ---------------------------------------------------------------- loading weights


def test_a_sharded_checkpoint_is_loaded_and_dispatched(
    library: Any, device: str, twin: Model, weights_location: str
) -> None:
    model = library.load_checkpoint_and_dispatch(
        skeleton(library), checkpoint=weights_location, device_map="auto", no_split_module_classes=["Block"]
    )
    assert_right(library, model, twin)
    assert model.hf_device_map == {"": "cpu" if device == "cpu" else 0}
    assert {str(parameter.device) for parameter in model.parameters()} == {device}


def test_an_index_can_be_named_itself(library: Any, twin: Model, weights_location: str) -> None:
    index = f"{weights_location}/model.index.json"
    model = library.load_checkpoint_and_dispatch(skeleton(library), index, device_map="auto")
    assert_right(library, model, twin)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_weights_that_do_not_fit_are_on_disk(
    library: Any, device: str, twin: Model, weights_location: str, strategy: str, moved: Counter[str], tmp_path: Path
) -> None:
    model = library.load_checkpoint_and_dispatch(
        skeleton(library),
        weights_location,
        device_map=strategy,
        max_memory={"cpu" if device == "cpu" else 0: 4 * BLOCK},
        no_split_module_classes=["Block"],
        offload_folder=tmp_path / "offload",
    )
    on_disk = [name for name, place in model.hf_device_map.items() if place == "disk"]
    assert on_disk
    moved.clear()
    assert_right(library, model, twin)
    if library is compat:
        assert offloaded_bytes(model, Tier.DISK) >= 2 * BLOCK
        assert moved["disk"] >= BLOCK  # the window keeps some of them
        assert not (tmp_path / "offload").exists()  # they are read in the checkpoint


def test_a_map_of_ones_own_is_followed(
    library: Any, device: str, twin: Model, weights_location: str, moved: Counter[str], tmp_path: Path
) -> None:
    device_map = {"embed": 0, "head": 0, "blocks.0": "disk", "blocks.1": "cpu", "blocks.2": "disk", "blocks.3": 0}
    device_map |= {"norm": "cpu"}
    if device == "cpu":
        device_map = {name: "cpu" if place == 0 else place for name, place in device_map.items()}
    model = library.load_checkpoint_and_dispatch(
        skeleton(library), checkpoint=weights_location, device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    assert model.hf_device_map == device_map
    assert model.hf_device_map is not device_map
    moved.clear()
    assert_right(library, model, twin)
    if library is compat:
        assert offloaded_bytes(model, Tier.DISK) == 2 * BLOCK
        assert 2 * BLOCK <= moved["disk"] < 3 * BLOCK  # each once, in whole pages
        assert offloaded_bytes(model, Tier.CPU) == (0 if device == "cpu" else BLOCK + 2 * 64 * 4)


def test_load_and_dispatch_in_two_steps(
    library: Any, device: str, twin: Model, weights_location: str, tmp_path: Path
) -> None:
    device_map = {"embed": device, "head": device, "blocks": "disk", "norm": device}
    model = skeleton(library)
    folder = tmp_path / "offload"
    assert library.load_checkpoint_in_model(model, weights_location, device_map, offload_folder=folder) is None
    assert library.dispatch_model(model, device_map, offload_dir=folder) is model
    assert model.hf_device_map == device_map
    assert_right(library, model, twin)


def test_without_a_map_a_checkpoint_is_only_loaded(library: Any, twin: Model, weights_location: str) -> None:
    model = library.load_checkpoint_and_dispatch(Model().eval(), weights_location)
    assert not hasattr(model, "hf_device_map")
    assert_right(library, model, copy.deepcopy(twin).cpu())


def test_a_transformers_model_generates_as_in_the_guide(library: Any, device: str, tmp_path: Path) -> None:
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    reference = hf.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path / "llama")
    with library.init_empty_weights():
        model = hf.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    device_map = {"model.embed_tokens": device, "lm_head": device, "model.norm": device, "model.rotary_emb": device}
    device_map |= {f"model.layers.{index}": place for index, place in enumerate(["cpu", "disk", device, "disk"])}
    model = library.load_checkpoint_and_dispatch(
        model, str(tmp_path / "llama"), device_map=device_map, offload_folder=str(tmp_path / "offload")
    ).eval()
    inputs = {"input_ids": IDS.to(device), "attention_mask": torch.ones_like(IDS).to(device)}
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    expected = reference.to(device).generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(output, expected)


# ---------------------------------------------------------------- designing a device map


def test_the_guides_budgets_for_two_gpus(library: Any) -> None:
    max_memory = {0: "10GiB", 1: "10GiB", "cpu": "30GiB"}
    with library.init_empty_weights():
        my_model = nn.Sequential(*[nn.Linear(32768, 32768, bias=False) for _ in range(10)])  # 4 GiB each
    device_map = library.infer_auto_device_map(my_model, max_memory=max_memory)
    held = Counter(device_map[str(index)] for index in range(10))
    assert held[0] <= 2
    assert 0 < held[1] <= 2
    assert 0 < held["cpu"] <= 7
    assert held[0] + held[1] + held["cpu"] + held["disk"] == 10


@pytest.mark.parametrize(
    "device_map",
    [
        {"block1": "cpu", "block2": "disk"},
        {"block1": "cpu", "block2.linear1": "cpu", "block2.linear2": "disk", "block2.linear3": "disk"},
    ],
)
def test_maps_of_blocks_and_of_what_is_in_them(library: Any, device_map: dict[str, str], tmp_path: Path) -> None:
    model = two_blocks()
    twin = copy.deepcopy(model)
    model = library.dispatch_model(model, device_map, offload_dir=tmp_path)
    x = torch.randn(2, 32)
    assert torch.allclose(model(x), twin(x), atol=1e-6)
    if library is compat:
        assert torch.equal(model(x), twin(x))
        blocks = [path for path, place in device_map.items() if place == "disk"]
        modules = [model.get_submodule(path) for path in blocks]
        assert offloaded_bytes(model, Tier.DISK) == sum(p.nbytes for m in modules for p in m.parameters())


def test_a_map_that_does_not_cover_all_is_an_error(library: Any, tmp_path: Path) -> None:
    incomplete = {"block1": "cpu", "block2.linear1": "disk", "block2.linear2": "disk"}
    with pytest.raises(ValueError, match=r"block2\.linear3\.weight"):
        library.dispatch_model(two_blocks(), incomplete, offload_dir=tmp_path)


def two_blocks() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(OrderedDict((f"linear{index}", nn.Linear(32, 32)) for index in (1, 2, 3)))

    return aligned(nn.Sequential(OrderedDict(block1=block(), block2=block())))


# ---------------------------------------------------------------- CPU offload only


def test_all_of_a_model_is_offloaded_to_the_cpu(
    library: Any, device: str, model: Model, twin: Model, moved: Counter[str]
) -> None:
    assert library.cpu_offload(model, torch.device(device)) is model
    assert_right(library, model, twin)
    if library is compat and device != "cpu":
        everything = sum(parameter.nbytes for parameter in model.parameters())
        assert offloaded_bytes(model, Tier.CPU) == everything
        assert moved["cpu"] >= everything


def pipeline(library: Any, device: str) -> tuple[list[nn.Module], list[Any]]:
    models: list[nn.Module] = [aligned(nn.Linear(32, 32)) for _ in range(3)]
    hooks: list[Any] = []
    for model in models:
        same, hook = library.cpu_offload_with_hook(model, device, *([hooks[-1]] if hooks else []))
        assert same is model
        hooks.append(hook)
    return models, hooks


def test_models_take_turns_on_the_device(library: Any, device: str) -> None:
    (model_1, model_2, model_3), (hook_1, hook_2, hook_3) = pipeline(library, device)
    twins = [copy.deepcopy(model).to(device) for model in (model_1, model_2, model_3)]
    held = [[*model.parameters()] for model in (model_1, model_2, model_3)]

    def where() -> list[str]:
        return [str(next(model.parameters()).device) for model in (model_1, model_2, model_3)]

    assert where() == ["cpu", "cpu", "cpu"]
    hid_1 = model_1(torch.ones(2, 32))
    assert where() == [device, "cpu", "cpu"]
    for _ in range(5):
        hid_2 = model_2(hid_1)
        assert where() == ["cpu", device, "cpu"]
    hid_3 = model_3(hid_2)
    assert where() == ["cpu", "cpu", device]
    hook_3.offload()
    assert where() == ["cpu", "cpu", "cpu"]
    expected = twins[2](twins[1](twins[0](torch.ones(2, 32, device=device))))
    assert torch.equal(hid_3, expected)
    for hook in (hook_1, hook_2, hook_3):
        hook.remove()
    assert where() == ["cpu", "cpu", "cpu"]
    if library is compat:
        for model, parameters in zip((model_1, model_2, model_3), held, strict=True):
            assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
            assert managed(model) is None
            assert type(model.weight) is nn.Parameter


# ---------------------------------------------------------------- disk offload only


def test_all_of_a_model_is_offloaded_to_disk(
    library: Any, execution_device: str, model: Model, twin: Model, moved: Counter[str], tmp_path: Path
) -> None:
    assert library.disk_offload(model, tmp_path / "offload", torch.device(execution_device)) is model
    assert_right(library, model, twin)
    if library is compat:
        assert offloaded_bytes(model, Tier.DISK) == sum(parameter.nbytes for parameter in model.parameters())
        assert moved["disk"] >= sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_hooks_are_removed(library: Any, offload: str, model: Model, twin: Model, tmp_path: Path) -> None:
    call: Callable[..., Any] = getattr(library, offload)
    call(model, *([tmp_path] if offload == "disk_offload" else []))
    assert library.remove_hook_from_submodules(model) is None
    assert not any(library.has_offloaded_params(module) for module in model.modules())
    assert_right(library, model, twin)
    assert {parameter.device for parameter in model.parameters()} == {p.device for p in twin.parameters()}


def test_offloaded_modules_say_so(library: Any, model: Model, tmp_path: Path) -> None:
    assert not any(library.has_offloaded_params(module) for module in model.modules())
    library.disk_offload(model, tmp_path)
    assert library.has_offloaded_params(model.blocks[0].up)
    assert library.has_offloaded_params(model.embed)
    assert not library.has_offloaded_params(model)
    assert not library.has_offloaded_params(model.blocks)


def test_a_module_is_aligned(library: Any, execution_device: str, model: Model, twin: Model, tmp_path: Path) -> None:
    library.disk_offload(model, tmp_path)
    linear, expected = model.blocks[1].up, twin.blocks[1].up.weight
    with library.align_module_device(linear, torch.device(execution_device)) as nothing:
        assert nothing is None
        assert str(linear.weight.device) == execution_device
        assert torch.equal(linear.weight, expected)
    with library.align_module_device(linear):
        assert str(linear.weight.device) == execution_device
        assert torch.equal(linear.weight, expected)
