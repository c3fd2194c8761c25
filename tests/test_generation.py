"""What Transformers does with a model, done with an offloaded one: the texts are those of the resident model."""

import contextlib
import copy
import dataclasses
import inspect
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overspill
from models import ARCHITECTURES, IDS, MASK, VOCAB, Architecture, randomized
from overspill.checkpoint import open_checkpoint
from overspill.training.activations import Limits
from support import TIERS, aligned, loaded, streamed_units

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

NAMES = ["llama", "llama-tied", "gpt2", "qwen3", "gemma3", "qwen3-moe", "mixtral", "mamba", "jamba", "t5", "bart"]
GENERATING = {architecture.name: architecture for architecture in ARCHITECTURES if architecture.name in NAMES}
CONVERTED = {"qwen3-moe", "mixtral", "jamba"}
"""Those that are stored expert by expert, and fused when they are loaded."""

TELLS_OF_INPUTS_ON_THE_CPU = 'input_ids.device.type != "cpu"' not in inspect.getsource(transformers.GenerationMixin)
"""Transformers 5.17 does, 5.22 does not any more."""

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "top_k": 40, "temperature": 1.5}


@dataclasses.dataclass(frozen=True)
class Case:
    """An architecture, its weights as Transformers stores them, and the model that they were stored from."""

    architecture: Architecture
    checkpoint: Path
    resident: Any

    def on(self, device: str) -> Any:
        """The resident model, on the device that computes."""
        return self.resident.to(device)

    def loaded(self, tier: str, device: str = "cpu") -> Any:
        """Offloaded to `tier`, with a window that all of the model does not fit in."""
        return loaded(self.architecture.build, self.checkpoint, tier, device)


def stored(architecture: Architecture, folder: Path) -> Case:
    torch.manual_seed(0)
    resident: Any = aligned(randomized(architecture.build())).eval()
    resident.save_pretrained(folder)
    return Case(architecture, folder, resident)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return stored(GENERATING[request.param], tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return stored(GENERATING["llama"], tmp_path_factory.mktemp("stored"))


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def generated_by(
    model: Any, device: str = "cpu", ids: torch.Tensor = IDS, mask: torch.Tensor = MASK, **options: Any
) -> list[torch.Tensor]:
    """Eight tokens for each text, and the logits that they were chosen by, from the same random numbers."""
    torch.manual_seed(3)
    output = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        min_new_tokens=8,
        max_new_tokens=8,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    assert len(output.logits) == 8
    return [output.sequences, *output.logits]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert [our.tolist() for our in ours[:1]] == [their.tolist() for their in theirs[:1]]
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


def assert_streamed(moved: Counter[str], tier: str, model: nn.Module) -> None:
    """All that streams came, from the tiers that have it, and where that is all of a model, some of it again."""
    streamed = sum(spec.nbytes for unit in streamed_units(model) for spec in unit.store.layout.specs)
    assert moved.total() >= streamed > 0
    assert moved.total() > streamed or tier == "mixed"
    assert (moved["cpu"] > 0) == (tier in ("cpu", "mixed"))
    assert (moved["disk"] > 0) == (tier in ("disk", "mixed"))


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize("choice", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
def test_a_padded_batch_is_continued_token_for_token(
    case: Case, tier: str, device: str, choice: dict[str, Any], moved: Counter[str]
) -> None:
    model = case.loaded(tier, device)
    moved.clear()
    ours = generated_by(model, device, **choice)
    assert_streamed(moved, tier, model)
    assert_equal(ours, generated_by(case.on(device), device, **choice))


def test_the_experts_are_stored_otherwise_than_they_run(case: Case) -> None:
    stored, run = set(open_checkpoint(case.checkpoint)), set(case.resident.state_dict())
    assert bool(stored - run) == (case.architecture.name in CONVERTED)


@pytest.mark.parametrize(
    "choice", [{"num_beams": 3}, {"num_beams": 2, "do_sample": True, "num_return_sequences": 2}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beams(name: str, tier: str, device: str, choice: dict[str, Any], moved: Counter[str], tmp_path: Path) -> None:
    case = stored(GENERATING[name], tmp_path)
    model = case.loaded(tier, device)
    moved.clear()
    ours = generated_by(model, device, **choice)
    assert_streamed(moved, tier, model)
    assert_equal(ours, generated_by(case.on(device), device, **choice))


CACHES = [
    *[pytest.param(name, "static", "cpu", id=f"{name}-static-cpu") for name in ("llama", "gemma3", "bart")],
    *[
        pytest.param(name, "static", "cuda:0", id=f"{name}-static-cuda", marks=pytest.mark.gpu)
        for name in ("llama", "gemma3", "bart")
    ],
    # It has streams, so no CPU. And no encoder-decoder: a resident one, too, meets its own cross-attention's keys on
    # the CPU (Transformers 5.17).
    *[
        pytest.param(name, "offloaded", "cuda:0", id=f"{name}-offloaded-cuda", marks=pytest.mark.gpu)
        for name in ("llama", "gemma3")
    ],
]


@pytest.fixture
def _patient_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' offloaded caches use what they copy before it is there, if the device is busy (5.17 to 5.22)."""
    layer = transformers.cache_utils.CacheLayerMixin

    def patient(copy: Any) -> Any:
        def copy_and_wait(self: Any) -> None:
            torch.accelerator.synchronize()
            copy(self)
            torch.accelerator.synchronize()

        return copy_and_wait

    if torch.accelerator.is_available():
        for name in ("offload", "prefetch"):
            monkeypatch.setattr(layer, name, patient(getattr(layer, name)))


@pytest.mark.usefixtures("_patient_caches")
@pytest.mark.parametrize(("name", "cache", "on"), CACHES)
def test_caches_of_other_kinds(name: str, tier: str, cache: str, on: str, moved: Counter[str], tmp_path: Path) -> None:
    case = stored(GENERATING[name], tmp_path)
    model = case.loaded(tier, on)
    choice: dict[str, Any] = {**GREEDY, "cache_implementation": cache, "disable_compile": True}
    moved.clear()
    ours = generated_by(model, on, **choice)
    assert_streamed(moved, tier, model)
    assert_equal(ours, generated_by(case.on(on), on, **choice))
    assert_equal(ours[:1], generated_by(case.on(on), on, **GREEDY)[:1])


@pytest.fixture(scope="module")
def drafter(llama: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The model with a little noise: some of what it drafts is taken, and some is not."""
    resident = copy.deepcopy(llama.resident)
    random = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in resident.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=random))
    folder = tmp_path_factory.mktemp("drafter")
    resident.save_pretrained(folder)
    return Case(llama.architecture, folder, aligned(resident))


@pytest.mark.parametrize("choice", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("assistant_too", [False, True])
def test_assisted_generation(
    llama: Case, drafter: Case, tier: str, assistant_too: bool, device: str, choice: dict[str, Any], moved: Counter[str]
) -> None:
    model = llama.loaded(tier, device)
    assistant = drafter.loaded(tier, device) if assistant_too else drafter.on(device)
    one_text: dict[str, Any] = {"ids": IDS[:1], "mask": MASK[:1]}
    moved.clear()
    ours = generated_by(model, device, **one_text, assistant_model=assistant, **choice)
    assert_streamed(moved, tier, model)
    theirs = generated_by(llama.on(device), device, **one_text, assistant_model=drafter.on(device), **choice)
    assert_equal(ours, theirs)


def test_a_text_that_is_looked_up_in_its_own_prompt(llama: Case, tier: str, device: str) -> None:
    ids = IDS[:1, :4].repeat(1, 3)
    choice: dict[str, Any] = {"ids": ids, "mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 3, **GREEDY}
    ours = generated_by(llama.loaded(tier, device), device, **choice)
    assert_equal(ours, generated_by(llama.on(device), device, **choice))


def test_a_model_generates_again_and_is_then_an_ordinary_one(case: Case, device: str) -> None:
    model = case.loaded("mixed", device)
    expected = generated_by(case.on(device), device, **GREEDY)
    for _ in range(2):
        assert_equal(generated_by(model, device, **GREEDY), expected)
    overspill.restore(model)
    assert_equal(generated_by(model, device, **GREEDY), expected)


# ---------------------------------------------------------------- tokenizers, pipelines, streamers

CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = {f"w{index}": index for index in range(VOCAB - 6)}
    words |= {word: len(words) + index for index, word in enumerate(["user", "assistant", "hello", "how", "are", "?"])}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole,
        pad_token="w0",
        bos_token="w1",
        eos_token="w2",
        unk_token="w3",
        padding_side="left",
        chat_template=CHAT,
    )


def prompts(tokenizer: Any) -> Any:
    return tokenizer(["hello how are w7 ?", "how w9"], padding=True, return_tensors="pt", return_token_type_ids=False)


@pytest.mark.parametrize("prompt", ["hello how", ["hello how are w7 ?", "how w9"], [{"role": "user", "content": "?"}]])
def test_a_pipeline(llama: Case, tokenizer: Any, tier: str, device: str, prompt: Any, moved: Counter[str]) -> None:
    model = llama.loaded(tier, device)
    answers = []
    for each in (model, llama.on(device)):
        moved.clear()
        pipe = transformers.pipeline("text-generation", model=each, tokenizer=tokenizer, batch_size=2)
        answers.append(pipe(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False))
        if each is model:
            assert_streamed(moved, tier, model)
    assert answers[0] == answers[1]
    assert str(answers[0]) != str(prompt)


@pytest.mark.parametrize("to_the_model", [False, True])
def test_inputs_may_stay_where_they_are_or_go_to_the_model(
    llama: Case, tokenizer: Any, tier: str, device: str, to_the_model: bool
) -> None:
    model, resident = llama.loaded(tier, device), llama.on(device)
    inputs = prompts(tokenizer)
    theirs = resident.generate(**prompts(tokenizer).to(device), max_new_tokens=6, do_sample=False)
    assert model.device == torch.device(device), "where it computes, not where its weights rest"
    told = not to_the_model and device != "cpu" and TELLS_OF_INPUTS_ON_THE_CPU
    with pytest.warns(UserWarning, match="`input_ids` is on cpu") if told else contextlib.nullcontext():
        given = inputs.to(model.device) if to_the_model else inputs
        ours = model.generate(**given, max_new_tokens=6, do_sample=False)
    assert ours.device == (model.device if to_the_model else torch.device("cpu"))
    assert tokenizer.batch_decode(ours) == tokenizer.batch_decode(theirs)


def test_a_chat_is_streamed_to_another_thread_word_by_word(llama: Case, tokenizer: Any, tier: str, device: str) -> None:
    messages = [{"role": "user", "content": "hello how are w7 ?"}]
    inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    pieces = []
    for model in (llama.loaded(tier, device), llama.on(device)):
        streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        options = {**inputs.to(device), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        thread = threading.Thread(target=model.generate, kwargs={**options, "streamer": streamer})
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1]
    assert len("".join(pieces[0]).split()) == 6


# ---------------------------------------------------------------- Trainer

TEXTS = torch.randint(4, VOCAB, (8, 10), generator=torch.Generator().manual_seed(6))
STRATEGIES: dict[str, dict[str, Any]] = {
    "activations": {"activations": True},
    "weights": {"activations": False, "weights": True},
    "both": {"activations": True, "weights": True},
    "recompute": {"recompute": True, "weights": True},
    "activations on disk": {"activations": "disk"},
    "within a budget": {"memory": "1GiB"},
}


@pytest.fixture
def _small_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tiny blocks save is not too small to leave either."""
    limits = Limits(small=0, held=0, ahead=1 << 13)
    monkeypatch.setattr(Limits, "usual", classmethod(lambda cls, *args, **kwargs: limits))


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    """On the CPU, where the optimizer rounds alike whether weights are offloaded or not."""
    arguments: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    texts = [{"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text} for text in TEXTS]
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **{**arguments, **options}),
        train_dataset=texts,
        eval_dataset=texts[:2],
    )


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    mine, expected = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(mine[name], value)] == []


def assert_same_files(ours: Path, theirs: Path, name: str = "model.safetensors") -> None:
    mine, expected = load_file(ours / name), load_file(theirs / name)
    assert mine.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(mine[name], value)] == []


@pytest.mark.usefixtures("_small_tensors_leave")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("name", "options"), [("llama-tied", {}), ("qwen3-moe", {"gradient_accumulation_steps": 2, "optim": "sgd"})]
)
def test_trainer_trains_the_same_weights(name: str, strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    case = stored(GENERATING[name], tmp_path / "stored")
    model, resident = copy.deepcopy(case.resident), copy.deepcopy(case.resident)
    overspill.offload_training(model, **STRATEGIES[strategy])
    trainers = [trainer_of(each, tmp_path, **options) for each in (model, resident)]
    for trainer in trainers:
        trainer.train()
    assert len(logged(trainers[0])) == 3
    assert logged(trainers[0]) == logged(trainers[1])
    assert_same_state(model, resident)
    assert not torch.equal(resident.lm_head.weight, case.resident.lm_head.weight)
    losses = [trainer.evaluate()["eval_loss"] for trainer in trainers]
    assert losses[0] == losses[1]
    for trainer, folder in zip(trainers, ("ours", "theirs"), strict=True):
        trainer.save_model(str(tmp_path / folder))
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    overspill.restore(model)
    assert_same_state(model, resident)


@pytest.mark.parametrize("strategy", ["activations", "weights"])
def test_trainer_goes_on_from_a_checkpoint_of_an_offloaded_model(llama: Case, strategy: str, tmp_path: Path) -> None:
    resident = copy.deepcopy(llama.resident)
    trainer_of(resident, tmp_path).train()
    first, second = (copy.deepcopy(llama.resident) for _ in range(2))
    for model in (first, second):
        overspill.offload_training(model, **STRATEGIES[strategy])
    trainer_of(first, tmp_path, save_strategy="steps", save_steps=2).train()
    trainer_of(second, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_state(first, resident)
    assert_same_state(second, resident)


@pytest.mark.gpu
@pytest.mark.usefixtures("_small_tensors_leave")
@pytest.mark.parametrize("strategy", ["activations", "weights", "recompute"])
def test_trainer_trains_and_saves_in_half_precision_on_a_gpu(llama: Case, strategy: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "use_cpu": False,
        "fp16": True,
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 4,
        # What rounds alike wherever the weights are: a factor of two, and no norm of all gradients.
        "optim": "sgd",
        "learning_rate": 2**-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    models = []
    for folder in ("theirs", "ours", "resumed"):
        model = copy.deepcopy(llama.resident).cuda()
        if folder != "theirs":
            overspill.offload_training(model, **STRATEGIES[strategy])
        last = str(tmp_path / "ours" / "checkpoint-4") if folder == "resumed" else None
        trainer = trainer_of(model, tmp_path / folder, **arguments)
        trainer.train(resume_from_checkpoint=last)
        models.append((model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    (theirs, losses), (ours, our_losses), (resumed, _) = models
    assert our_losses == losses
    for model in (ours, resumed):
        overspill.restore(model, device="cuda")
        assert_same_state(model, theirs)
    assert_same_files(tmp_path / "ours" / "checkpoint-8", tmp_path / "theirs" / "checkpoint-8")


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "t5"])
def test_trainer_saves_a_model_that_is_offloaded(name: str, tier: str, tmp_path: Path) -> None:
    case = stored(GENERATING[name], tmp_path / "stored")
    model = case.loaded(tier)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    trainer_of(model, tmp_path).save_model(str(tmp_path / "ours"))
    edited = copy.deepcopy(case.resident)
    with torch.no_grad():
        next(edited.parameters()).mul_(2)
    edited.save_pretrained(tmp_path / "theirs")
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


# ---------------------------------------------------------------- adapters


TARGETS = ["q_proj", "o_proj", "down_proj"]


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=TARGETS))


def train(model: Any) -> list[torch.Tensor]:
    """Five steps, with dropout. Returns the losses."""
    torch.manual_seed(5)
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses = []
    for _ in range(5):
        loss = model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora" in name}


def assert_same_adapter(ours: Any, theirs: Any) -> None:
    mine, expected = adapter_of(ours), adapter_of(theirs)
    assert mine.keys() == expected.keys()
    assert all(value.any() for value in expected.values())  # lora_B begins with zeros
    assert [name for name, value in expected.items() if not torch.equal(mine[name], value)] == []


@pytest.fixture(scope="module")
def adapters(llama: Case, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of them, as PEFT saves them."""
    folders = [tmp_path_factory.mktemp("adapter") for _ in range(2)]
    for seed, folder in enumerate(folders):
        model = with_lora(copy.deepcopy(llama.resident))
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
        model.save_pretrained(folder)
    return folders


def test_texts_with_adapters_that_are_loaded_switched_and_left_out(
    llama: Case, adapters: list[Path], tier: str, moved: Counter[str]
) -> None:
    peft = pytest.importorskip("peft")
    offloaded = llama.loaded(tier)
    models = []
    for base in (offloaded, copy.deepcopy(llama.resident)):
        models.append(peft.PeftModel.from_pretrained(base, adapters[0]).eval())
        models[-1].load_adapter(adapters[1], "second")
    moved.clear()
    texts = []
    for adapter in ("default", "second", "default"):
        for model in models:
            model.set_adapter(adapter)
        ours, theirs = (generated_by(model, **GREEDY) for model in models)
        assert_equal(ours, theirs)
        texts.append(ours)
    assert_streamed(moved, tier, offloaded)
    assert not torch.equal(texts[0][1], texts[1][1])
    with models[0].disable_adapter(), models[1].disable_adapter():
        plain, theirs = (generated_by(model, **GREEDY) for model in models)
    assert_equal(plain, theirs)
    assert not torch.equal(texts[0][1], plain[1])
    # Not with the model that PEFT has not seen: torch computes otherwise with weights that are not trained.
    assert_equal(*(generated_by(model.unload(), **GREEDY) for model in models))


@pytest.mark.parametrize("tokens", [10, 8192])
def test_a_plan_for_long_texts_keeps_the_room_that_they_take(llama: Case, tokens: int) -> None:
    config = llama.resident.config
    width = 2 * config.num_key_value_heads * config.head_dim * llama.resident.dtype.itemsize
    plan = overspill.plan(llama.resident, {"cpu": "1GiB"}, context=tokens, batch=4)
    assert plan.headroom == {torch.device("cpu"): 4 * tokens * config.num_hidden_layers * width}
    assert plan.budgets == {torch.device("cpu"): (1 << 30) - plan.headroom[torch.device("cpu")]}


BUDGETS: dict[str, dict[int | str, int | str]] = {"disk": {}, "mixed": {"cpu": "1500KiB"}}


@pytest.fixture(params=["llama", "llama-tied"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return stored(GENERATING[request.param], tmp_path / "stored")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_lora_that_is_trained_on_an_offloaded_base_and_its_merge(
    base: Case, tier: str, recompute: bool, moved: Counter[str], tmp_path: Path
) -> None:
    offloaded = base.loaded(tier)
    models = [with_lora(each) for each in (offloaded, copy.deepcopy(base.resident))]
    if recompute:
        for model in models:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
    moved.clear()
    ours = train(models[0])
    assert_streamed(moved, tier, offloaded)
    assert torch.equal(torch.stack(ours), torch.stack(train(models[1])))
    assert ours[-1] < ours[0]
    assert_same_adapter(*models)
    for model, folder in zip(models, ("ours", "theirs"), strict=True):
        model.save_pretrained(tmp_path / "adapter" / folder)
        model.merge_and_unload().save_pretrained(tmp_path / folder)
    assert_same_files(tmp_path / "adapter" / "ours", tmp_path / "adapter" / "theirs", "adapter_model.safetensors")
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    before, after = (load_file(folder / "model.safetensors") for folder in (base.checkpoint, tmp_path / "ours"))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if name.split(".")[-2] in TARGETS}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_lora_that_trainer_trains_on_a_base_within_a_budget(base: Case, budget: str, tmp_path: Path) -> None:
    offloaded = overspill.from_pretrained(
        transformers.AutoModelForCausalLM, base.checkpoint, max_memory=BUDGETS[budget], device="cpu"
    )
    assert streamed_units(offloaded)
    models = [with_lora(each) for each in (offloaded, copy.deepcopy(base.resident))]
    trainers = []
    for model in models:
        trainers.append(trainer_of(model, tmp_path))  # which sets the seed
        trainers[-1].train()
    assert logged(trainers[0]) == logged(trainers[1])
    assert_same_adapter(*models)
    assert_same_state(models[0].merge_and_unload(), models[1].merge_and_unload())
    assert offloaded.config.tie_word_embeddings == base.resident.config.tie_word_embeddings
