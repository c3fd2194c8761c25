"""What Transformers does with a model, done with an offloaded one: the texts are those of the resident model."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from models import ARCHITECTURES, IDS, MASK, VOCAB, Architecture, randomized
from overspill.checkpoint import open_checkpoint
from overspill.plan import Plan
from support import TIERS, aligned, loaded, narrow, placed, streamed_units

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

NAMES = ["llama", "llama-tied", "gpt2", "qwen3", "gemma3", "qwen3-moe", "mixtral", "mamba", "jamba", "t5", "bart"]
GENERATING = {architecture.name: architecture for architecture in ARCHITECTURES if architecture.name in NAMES}
CONVERTED = {"qwen3-moe", "mixtral", "jamba"}
"""Those that are stored expert by expert, and fused when they are loaded."""

GREEDY = {"do_sample": False}
SAMPLING = {"do_sample": True, "top_k": 40, "temperature": 1.5}


@dataclasses.dataclass(frozen=True)
class Case:
    """An architecture, its weights as Transformers stores them, and the model that they were stored from."""

    architecture: Architecture
    checkpoint: Path
    resident: Any

    def on(self, device: str) -> Any:
        """The resident model, on the device that computes."""
        return self.resident.to(device)

    def loaded(self, tier: str, device: str) -> Any:
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


def assert_streamed(moved: Counter[str], tier: str, model: nn.Module, passes: int = 1) -> None:
    """What streams came in each of `passes`, or is still in a window that holds three units, from its tiers only."""
    sizes = [sum(spec.nbytes for spec in unit.store.layout.specs) for unit in streamed_units(model)]
    assert sizes
    kept = 3 * max(sizes)
    assert moved.total() >= sum(sizes) + (passes - 1) * max(sum(sizes) - kept, 0)
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
    assert_streamed(moved, tier, model, passes=8)
    assert_equal(ours, generated_by(case.on(device), device, **choice))


def test_the_experts_are_stored_otherwise_than_they_run(case: Case) -> None:
    stored, run = set(open_checkpoint(case.checkpoint)), set(case.resident.state_dict())
    assert bool(stored - run) == (case.architecture.name in CONVERTED)


@pytest.mark.parametrize(
    "choice", [{"num_beams": 3}, {"num_beams": 2, "do_sample": True, "num_return_sequences": 2}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beams(
    name: str, tier: str, device: str, choice: dict[str, Any], moved: Counter[str], tmp_path: Path
) -> None:
    case = stored(GENERATING[name], tmp_path)
    model = case.loaded(tier, device)
    moved.clear()
    ours = generated_by(model, device, **choice)
    assert_streamed(moved, tier, model, passes=8)
    assert_equal(ours, generated_by(case.on(device), device, **choice))


CACHES = [
    pytest.param("static", "cpu", id="static-cpu"),
    pytest.param("static", "cuda:0", id="static-cuda", marks=pytest.mark.gpu),
    pytest.param("offloaded", "cuda:0", id="offloaded-cuda", marks=pytest.mark.gpu),  # it has streams, so no CPU
    pytest.param("offloaded_static", "cuda:0", id="offloaded-static-cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("cache", "on"), CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "bart"])
def test_caches_of_other_kinds(
    name: str, tier: str, cache: str, on: str, moved: Counter[str], tmp_path: Path
) -> None:
    case = stored(GENERATING[name], tmp_path)
    model = case.loaded(tier, on)
    choice = {**GREEDY, "cache_implementation": cache, "disable_compile": True}
    moved.clear()
    ours = generated_by(model, on, **choice)
    assert_streamed(moved, tier, model, passes=8)
    assert_equal(ours, generated_by(case.on(on), on, **choice))
    assert_equal(ours[:1], generated_by(case.on(on), on, **GREEDY)[:1])


@pytest.fixture(scope="module")
def drafter(llama: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The model's first layers: right often enough for some of what it drafts to be taken, and some not."""

    def build() -> nn.Module:
        config = transformers.LlamaConfig(**{**llama.resident.config.to_dict(), "num_hidden_layers": 2})
        return transformers.LlamaForCausalLM(config)

    resident: Any = build()
    resident.load_state_dict(llama.resident.state_dict(), strict=False)
    folder = tmp_path_factory.mktemp("drafter")
    resident.save_pretrained(folder)
    architecture = dataclasses.replace(llama.architecture, name="drafter", build=build)
    return Case(architecture, folder, aligned(resident).eval())


@pytest.mark.parametrize("choice", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("drafts_from", ["device", "disk"])
def test_assisted_generation(
    llama: Case, drafter: Case, tier: str, drafts_from: str, device: str, choice: dict[str, Any], moved: Counter[str]
) -> None:
    model = llama.loaded(tier, device)
    assistant = drafter.on(device) if drafts_from == "device" else drafter.loaded(drafts_from, device)
    one_text = {"ids": IDS[:1], "mask": MASK[:1]}
    moved.clear()
    ours = generated_by(model, device, **one_text, assistant_model=assistant, **choice)
    assert moved.total() > sum(spec.nbytes for unit in streamed_units(model) for spec in unit.store.layout.specs)
    theirs = generated_by(llama.on(device), device, **one_text, assistant_model=drafter.on(device), **choice)
    assert_equal(ours, theirs)


def test_a_text_that_is_looked_up_in_its_own_prompt(llama: Case, tier: str, device: str) -> None:
    ids = IDS[:1, :4].repeat(1, 3)
    choice = {"ids": ids, "mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 3, **GREEDY}
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
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_pipeline(
    llama: Case, tokenizer: Any, tier: str, device: str, prompt: Any, batch_size: int, moved: Counter[str]
) -> None:
    model = llama.loaded(tier, device)
    answers = []
    for each in (model, llama.on(device)):
        moved.clear()
        pipe = transformers.pipeline("text-generation", model=each, tokenizer=tokenizer, batch_size=batch_size)
        answers.append(pipe(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False))
        if each is model:
            assert_streamed(moved, tier, model, passes=6)
    assert answers[0] == answers[1]
    assert str(answers[0]) != str(prompt)


@pytest.mark.parametrize("to_the_model", [False, True])
def test_inputs_may_stay_where_they_are_or_go_to_the_model(
    llama: Case, tokenizer: Any, tier: str, device: str, to_the_model: bool
) -> None:
    model, resident = llama.loaded(tier, device), llama.on(device)
    inputs = prompts(tokenizer)
    theirs = resident.generate(**prompts(tokenizer).to(device), max_new_tokens=6, do_sample=False)
    ours = model.generate(**(inputs.to(model.device) if to_the_model else inputs), max_new_tokens=6, do_sample=False)
    assert ours.device == (model.device if to_the_model else torch.device("cpu"))
    assert tokenizer.batch_decode(ours) == tokenizer.batch_decode(theirs)


def test_a_chat_is_streamed_to_another_thread_word_by_word(
    llama: Case, tokenizer: Any, tier: str, device: str
) -> None:
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
