"""Transformers' way in and out: `from_pretrained` within a budget, and `save_pretrained` of what is offloaded."""

import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import overspill
from overspill.errors import BudgetError, CheckpointMismatchError, CheckpointNotFoundError, PlanError, SaveError
from overspill.homes import DiskTensor, HostTensor

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
BUDGETS: dict[str, dict[int | str, int | str]] = {"disk": {}, "mixed": {"cpu": "60KiB"}}


def deepseek() -> Any:
    """A mixture of experts that is stored expert by expert, in bfloat16 with an island of float32."""
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        qk_nope_head_dim=8,
        first_k_dense_replace=1,
        eos_token_id=None,
    )
    return transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("stored")
    model = deepseek()
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(folder / "in one dtype")
    folder = folder / "with an island"
    transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "in one dtype").save_pretrained(folder)
    return folder


@pytest.fixture
def resident(stored: Path, device: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(stored).to(device)


@pytest.fixture(params=BUDGETS)
def budget(request: pytest.FixtureRequest) -> dict[int | str, int | str]:
    return BUDGETS[request.param]


def ours(path: Path, budget: dict[int | str, int | str], device: str, **options: Any) -> Any:
    model = overspill.from_pretrained(
        transformers.AutoModelForCausalLM, path, max_memory=budget, device=device, **options
    )
    assert any(isinstance(parameter, DiskTensor) for parameter in model.parameters())
    if budget and device != "cpu":
        assert any(isinstance(parameter, HostTensor) for parameter in model.parameters())
    return model


def content(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                assert name not in tensors
                tensors[name] = opened.get_tensor(name)
    return tensors


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name


def test_a_model_within_a_budget_is_the_one_that_transformers_loads(
    stored: Path, resident: Any, budget: dict[int | str, int | str], device: str, moved: Counter[str]
) -> None:
    model = ours(stored, budget, device)
    moved.clear()
    with torch.no_grad():
        logits = model(IDS.to(device)).logits
        assert torch.equal(logits, resident(IDS.to(device)).logits)
    assert moved["disk"] > 0
    assert not model.training
    assert model.generation_config.to_dict() == resident.generation_config.to_dict()
    assert model.config.to_dict() == resident.config.to_dict()
    assert_same(
        {name: value.cpu() for name, value in model.state_dict().items()},
        {name: value.cpu() for name, value in resident.state_dict().items()},
    )
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 3}], ids=str)
def test_it_generates_token_for_token_what_the_resident_model_does(
    stored: Path, resident: Any, device: str, sampling: dict[str, Any]
) -> None:
    model = ours(stored, BUDGETS["mixed"], device)
    texts = []
    for each in (resident, model):
        torch.manual_seed(3)
        texts.append(each.generate(IDS.to(device), max_new_tokens=6, **sampling))
    assert torch.equal(*texts)


def test_a_class_of_its_own_will_do_and_so_will_a_config(stored: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(stored)
    config.num_hidden_layers = 3
    model = overspill.from_pretrained(transformers.DeepseekV3ForCausalLM, stored, max_memory={}, config=config)
    assert type(model) is transformers.DeepseekV3ForCausalLM


def test_what_the_config_is_to_have_instead_is_passed_on(stored: Path) -> None:
    model = overspill.from_pretrained(
        transformers.AutoModelForCausalLM, stored, max_memory={}, num_experts_per_tok=3, attn_implementation="eager"
    )
    assert model.config.num_experts_per_tok == 3
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.float32, "float32", "auto", None, torch.float16])
def test_the_dtype_is_transformers_choice(stored: Path, dtype: torch.dtype | str | None) -> None:
    model = overspill.from_pretrained(transformers.AutoModelForCausalLM, stored, max_memory={}, dtype=dtype)
    resident = transformers.AutoModelForCausalLM.from_pretrained(stored, dtype="auto" if dtype is None else dtype)
    assert_same(dict(model.state_dict()), resident.state_dict())
    assert model.dtype == resident.dtype == model.config.dtype


# ---------------------------------------------------------------- save_pretrained


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "40KB"}, {"save_original_format": False}], ids=str)
def test_save_pretrained_writes_what_transformers_would(
    stored: Path,
    resident: Any,
    budget: dict[int | str, int | str],
    device: str,
    tmp_path: Path,
    options: dict[str, Any],
) -> None:
    model = ours(stored, budget, device)
    for each in (model, resident):
        with torch.no_grad():
            each.model.layers[1].mlp.experts.gate_up_proj[1].mul_(2)
    model.save_pretrained(tmp_path / "ours", **options)
    resident.save_pretrained(tmp_path / "theirs", **options)
    assert_same(content(tmp_path / "ours"), content(tmp_path / "theirs"))
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / file).read_text() == (tmp_path / "theirs" / file).read_text()
    others = [path.name for path in (tmp_path / "ours").iterdir() if path.suffix != ".safetensors"]
    assert set(others) <= {"config.json", "generation_config.json", "model.safetensors.index.json"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").to(device)
    with torch.no_grad():
        assert torch.equal(again(IDS.to(device)).logits, resident(IDS.to(device)).logits)


def test_save_pretrained_over_the_folder_that_it_was_loaded_from(
    stored: Path, resident: Any, device: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    resident.save_pretrained(folder)
    model = ours(folder, {}, device)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_same(content(folder), content(stored))
    with torch.no_grad():
        assert torch.equal(model(IDS.to(device)).logits, resident(IDS.to(device)).logits)


def test_copies_and_restored_models_have_the_method_of_their_class(stored: Path, tmp_path: Path) -> None:
    model = ours(stored, {}, "cpu")
    assert "save_pretrained" in vars(model)
    assert "save_pretrained" not in vars(copy.deepcopy(model))
    overspill.restore(model)
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path)
    assert_same(content(tmp_path), content(stored))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"safe_serialization": False}, "pickles"),
        ({"state_dict": {}}, "state_dict"),
        ({"variant": "fp16"}, "variant"),
        ({"distributed_checkpoint": True}, "distributed_checkpoint"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    stored: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    model = ours(stored, {}, "cpu")
    with pytest.raises(SaveError, match=reason):
        model.save_pretrained(tmp_path / "saved", **options)
    assert not (tmp_path / "saved").exists()


def test_only_the_main_process_writes(stored: Path, tmp_path: Path) -> None:
    ours(stored, {}, "cpu").save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not (tmp_path / "saved").exists()


def test_a_push_to_the_hub_is_passed_on(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Repository:
        repo_id = "someone/saved"

    def create_repo(name: str, **options: Any) -> Repository:
        calls.append((name, options))
        return Repository()

    def upload(self: Any, folder: Path, repository: str, before: dict[str, float], **options: Any) -> None:
        calls.append((repository, options))
        assert (folder / "model.safetensors").is_file()
        assert (folder / "config.json").is_file()

    monkeypatch.setattr("huggingface_hub.create_repo", create_repo)
    model = ours(stored, {}, "cpu")
    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, private=True, commit_message="why", token="secret")
    assert calls == [
        ("saved", {"exist_ok": True, "private": True, "token": "secret"}),
        ("someone/saved", {"commit_message": "why", "token": "secret"}),
    ]


# ---------------------------------------------------------------- adapters


def lora(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=2, target_modules=["o_proj", "kv_b_proj"], init_lora_weights=False, **options)


def test_a_merged_adapter_is_in_the_save(
    stored: Path, resident: Any, budget: dict[int | str, int | str], device: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    merged = []
    for each in (ours(stored, budget, device), resident):
        torch.manual_seed(1)
        merged.append(peft.get_peft_model(each, lora()))
    state = {name: value.detach().clone() for name, value in merged[0].state_dict().items() if "lora" in name}
    merged[1].load_state_dict(state, strict=False)
    with torch.no_grad():
        assert torch.equal(*(each(IDS.to(device)).logits for each in merged))
    for each, name in zip(merged, ("ours", "theirs"), strict=True):
        each.merge_and_unload().save_pretrained(tmp_path / name)
    assert_same(content(tmp_path / "ours"), content(tmp_path / "theirs"))
    base = content(stored)["model.layers.0.self_attn.o_proj.weight"]
    assert not torch.equal(content(tmp_path / "ours")["model.layers.0.self_attn.o_proj.weight"], base)


@pytest.mark.parametrize("offloaded_with_it", [False, True])
def test_an_adapter_is_saved_as_an_adapter(
    stored: Path, resident: Any, tmp_path: Path, device: str, offloaded_with_it: bool
) -> None:
    model = ours(stored, {}, device)
    torch.manual_seed(1)
    model.add_adapter(lora())
    if offloaded_with_it:
        overspill.restore(model)
        overspill.offload(model, to="disk", min_bytes=0, device=device)
        assert any(isinstance(p, DiskTensor) for name, p in model.named_parameters() if "lora" in name)
    model.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    tensors = content(tmp_path / "adapter")
    assert tensors
    assert all("lora" in name for name in tensors)
    resident.load_adapter(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(model(IDS.to(device)).logits, resident(IDS.to(device)).logits)


# ---------------------------------------------------------------- bad input


def load(path: Any, **options: Any) -> Any:
    return overspill.from_pretrained(transformers.AutoModelForCausalLM, path, max_memory={}, **options)


def test_a_path_that_does_not_exist_is_named_with_what_is_like_it(tmp_path: Path, stored: Path) -> None:
    (tmp_path / "llama-8b").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="llama-8b"):
        load(tmp_path / "lama-8b")


def test_a_name_of_the_hub_without_a_network() -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"someone/model.*[Nn]or could a model of the hub"):
        load("someone/model")


def test_a_file_is_no_folder(stored: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="folder that holds it"):
        load(stored / "model.safetensors")


def test_a_config_without_weights(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((stored / "config.json").read_bytes())
    with pytest.raises(CheckpointNotFoundError, match=re.escape(str(tmp_path))):
        load(tmp_path)


def test_weights_without_a_config(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((stored / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointNotFoundError, match=r"config\.json"):
        load(tmp_path)


def test_a_checkpoint_of_another_architecture(stored: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((stored / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointMismatchError, match=r"(?s)missing.*q_proj.*not in the model.*kv_b_proj"):
        load(tmp_path)


def test_a_quantized_checkpoint_is_refused_by_name(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((stored / "model.safetensors").read_bytes())
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="bitsandbytes"):
        load(tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"device_map": "auto"}, {"quantization_config": {}}, {"gguf_file": "a"}, {"state_dict": {}}, {"torch_dtype": 1}],
    ids=lambda options: next(iter(options)),
)
def test_an_option_without_a_meaning_here_is_refused_with_the_one_that_has_it(
    stored: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(PlanError, match=next(iter(options))):
        load(stored, **options)


def test_a_dtype_that_torch_does_not_have(stored: Path) -> None:
    with pytest.raises(PlanError, match="float13"):
        load(stored, dtype="float13")


# ---------------------------------------------------------------- room for what a model remembers

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(intermediate_size=48, num_key_value_heads=2, **SMALL),
        transformers.LlamaConfig(intermediate_size=48, head_dim=16, **SMALL),
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4),
        transformers.MistralConfig(intermediate_size=48, num_key_value_heads=2, sliding_window=None, **SMALL),
        transformers.Qwen2Config(intermediate_size=48, num_key_value_heads=2, **SMALL),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize(("context", "batch"), [(8, 1), (21, 3)])
def test_a_plan_leaves_the_room_that_the_cache_will_take(config: Any, context: int, batch: int) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.zeros(batch, context, dtype=torch.long)).past_key_values
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    budget: dict[int | str, int | str] = {"cpu": 1 << 30}
    planned = overspill.plan(model, budget, context=context, batch=batch, headroom="1MiB")
    assert planned.headroom == {torch.device("cpu"): taken + (1 << 20)}
    assert overspill.plan(model, budget, context=context, batch=batch).headroom == {torch.device("cpu"): taken}


def test_compressed_keys_and_values_get_room_enough() -> None:
    model = deepseek()
    with torch.no_grad():
        cache = model(IDS).past_key_values
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    plan = overspill.plan(model, {"cpu": "1GiB"}, context=IDS.numel())
    assert taken <= plan.headroom[torch.device("cpu")] <= 4 * taken


def test_a_layer_that_slides_remembers_no_more_than_its_window() -> None:
    config = transformers.Gemma2Config(
        intermediate_size=48, num_key_value_heads=2, head_dim=8, sliding_window=4, **SMALL
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    kinds = Counter(config.layer_types)
    tokens = kinds["full_attention"] * 100 + kinds["sliding_attention"] * 4
    plan = overspill.plan(model, {"cpu": "1GiB"}, context=100)
    assert plan.headroom == {torch.device("cpu"): tokens * 2 * 2 * 8 * model.dtype.itemsize}


def test_a_layer_remembers_its_chunk_and_a_state_of_fixed_size_counts_nothing() -> None:
    config = transformers.LlamaConfig(intermediate_size=48, num_key_value_heads=2, **SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.attention_chunk_size = 8
    for kinds, tokens in {
        ("full_attention", "chunked_attention"): 100 + 8,
        ("linear_attention", "full_attention"): 100,
        ("mamba", "conv"): 0,
    }.items():
        model.config.layer_types = list(kinds)
        plan = overspill.plan(model, {"cpu": "1GiB"}, context=100, headroom=1)
        of_a_token = 2 * 2 * config.head_dim * model.dtype.itemsize
        assert plan.headroom == {torch.device("cpu"): tokens * of_a_token + 1}


def test_more_to_remember_leaves_less_for_weights(stored: Path) -> None:
    budget: dict[int | str, int | str] = {"cpu": "90KiB"}
    plans = [
        overspill.from_pretrained(
            transformers.AutoModelForCausalLM, stored, max_memory=budget, context=context
        )._overspill.plan
        for context in (None, 60)
    ]
    assert plans[1].disk_bytes > plans[0].disk_bytes


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"batch": 4}, "context"), ({"context": 0}, "at least 1"), ({"context": 10**9}, "leaves nothing")],
)
def test_room_that_cannot_be_meant_or_given(stored: Path, options: dict[str, int], reason: str) -> None:
    with pytest.raises((PlanError, BudgetError), match=reason):
        overspill.from_pretrained(transformers.AutoModelForCausalLM, stored, max_memory={"cpu": "100KiB"}, **options)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
        transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
        transformers.SwinConfig(embed_dim=16, depths=[1], num_heads=[1], image_size=32),
        None,
    ],
    ids=lambda config: "no Transformers model" if config is None else config.model_type,
)
def test_a_model_whose_memory_is_not_known_needs_headroom(config: Any) -> None:
    model = torch.nn.Linear(4, 4) if config is None else transformers.AutoModel.from_config(config)
    with pytest.raises(PlanError, match=rf"what {type(model).__name__} remembers .* Pass headroom"):
        overspill.plan(model, {"cpu": "1GiB"}, context=8)
