import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import overspill
from overspill import devices
from overspill.cli.app import app
from overspill.cli.errors import MEANINGS, ExitCode, carried_out
from overspill.cli.lines import CHUNK, read_rate
from overspill.cli.memory import PeakMemory
from overspill.cli.options import parse_budget
from overspill.cli.output import Output
from overspill.errors import PlanError
from overspill.integrations import generating
from overspill.integrations.configs import model_class_of, skeleton_from_config
from support import aligned

PROMPT = "once upon a time"
STORY = f"{PROMPT} there was a model that did not fit in memory so it went to disk and back"
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def overspills(*arguments: object) -> Result:
    """What a command does, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def answer(*arguments: object) -> Any:
    """A command's JSON, which must be all of its stdout."""
    result = overspills(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refusal(*arguments: object, code: int) -> str:
    """What a command says when it fails: one line, no traceback, nothing on stdout."""
    result = overspills(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("overspill: ")
    assert "Traceback" not in result.stderr
    return result.stderr


def command(*arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "overspill", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
    )


def tiny_tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<unk>", "</s>", *STORY.split()]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer. Its layers are large enough to be streamed."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config_70b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path / "config.json"


@pytest.fixture(autouse=True)
def _no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and pages are the same wherever the tests run, but for those that are about a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(devices, "accelerators", list)


# The help and the exit codes.


def test_the_help_shows_every_command_and_every_exit_code() -> None:
    shown = overspills("--help").stdout
    for name in ("plan", "run", "inspect", "save", "bench"):
        assert f"\n│ {name} " in shown
    for code, meaning in MEANINGS.items():
        assert f"{code.value}  {meaning}" in shown


def test_each_command_has_help_and_the_common_options() -> None:
    for name in ("plan", "run", "inspect", "save", "bench"):
        result = overspills(name, "--help")
        assert result.exit_code == 0
        assert "--json" in result.stdout
        assert "--debug" in result.stdout


def test_the_version_is_the_librarys() -> None:
    assert overspills("--version").stdout == f"overspill {overspill.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["plam"], ["plan"], ["plan", "x", "--wrong"], ["run", "x"], ["bench", "--peer", "y"]]
)
def test_a_command_line_that_cannot_be_understood_exits_with_2(arguments: list[str]) -> None:
    assert "(see --help)" in refusal(*arguments, code=2)


def test_an_error_that_nobody_expected_exits_with_70_and_debug_shows_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("overspill.cli.inspect.inspect_checkpoint", broken)
    assert "KeyError: 'oops'. Run it again with --debug" in refusal("inspect", llama, code=70)
    assert isinstance(overspills("inspect", llama, "--debug").exception, KeyError)


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["plan", "nothing"], 1, "CheckpointNotFoundError"),
        (["run", "nothing", "--prompt", "x"], 1, "CheckpointNotFoundError"),
        (["inspect", "nothing"], 1, "CheckpointNotFoundError"),
        (["save", "nothing", "out"], 1, "CheckpointNotFoundError"),
        (["bench", "--device", "99"], 1, "BudgetError"),
        (["plan", "x", "--max-memory", "much"], 2, "BadParameter"),
        (["bench", "--size", "1MiB", "--device", "cpu"], 2, "BadParameter"),
        (["run", "x"], 2, "MissingParameter"),
        (["inspect", "x", "--wrong"], 2, "NoSuchOption"),
        (["plam"], 2, "UsageError"),
    ],
    ids=str,
)
def test_an_error_is_json_too_where_json_is_asked_for(
    arguments: list[str], code: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = overspills(*arguments, "--json")
    assert result.exit_code == code, result.output
    error = json.loads(result.stdout)["error"]
    assert error["type"] == kind
    assert error["message"] in result.stderr
    assert refusal(*arguments, code=code) == result.stderr


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_without_its_libraries_the_command_line_says_what_to_install(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith(("overspill.cli.", f"{library}."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("overspill.cli.main").main()
    assert ended.value.code == f"overspill: the command line needs {library}. Install it: pip install 'overspill[cli]'"


def test_without_transformers_a_command_that_needs_it_says_so(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for arguments in (["plan", llama], ["run", llama, "--prompt", "x"], ["inspect", llama, "--model"]):
        message = refusal(*arguments, code=1)
        assert "needs transformers. Install it: pip install 'overspill[transformers]'" in message


def test_without_matplotlib_a_plot_says_what_to_install(
    config_70b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    message = refusal("plan", config_70b, "--max-memory", "0=10GiB", "--plot", tmp_path / "plan.png", code=1)
    assert "pip install 'overspill[plot]'" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


# Budgets.


def test_a_budget_is_read_as_people_write_it() -> None:
    assert parse_budget("0=10GiB,cpu=30GiB") == {0: 10 << 30, "cpu": 30 << 30}
    assert parse_budget(" 1 = 1.5GB , cpu = 500 ") == {1: 1_500_000_000, "cpu": 500}
    assert parse_budget("cuda:1=1KiB") == {"cuda:1": 1024}
    assert parse_budget("disk") == {}


@pytest.mark.parametrize(
    "text", ["", "10GiB", "0:10GiB", "0=", "=10GiB", "0=ten", "0=10GiB,,cpu=1GiB", "0=1GiB,0=2GiB"]
)
def test_a_budget_that_cannot_be_read_is_answered_with_one_that_can(config_70b: Path, text: str) -> None:
    assert "Write, for example, 0=10GiB,cpu=30GiB" in refusal("plan", config_70b, "--max-memory", text, code=2)


def test_a_device_is_a_number_or_a_name(config_70b: Path) -> None:
    for device in ("1", "cuda:1"):
        planned = answer("plan", config_70b, "--max-memory", "0=100GiB,1=20GiB", "--device", device)
        assert planned["device"] == "cuda:1"
    assert "there is no device" in refusal("bench", "--device", "99", code=1)


def test_a_device_that_there_cannot_be_is_named(config_70b: Path) -> None:
    assert "'gpu0' is no device" in refusal("plan", config_70b, "--max-memory", "gpu0=10GiB", code=1)


# Plan.


def test_a_plan_for_a_gpu_that_is_not_here_needs_only_a_config(config_70b: Path) -> None:
    planned = answer("plan", config_70b, "--max-memory", "0=20GiB,cpu=60GiB")
    assert planned["device"] == "cuda:0"
    assert 140e9 < planned["total_bytes"] < 142e9
    assert planned["cpu_bytes"] > 0
    assert planned["disk_bytes"] > 0
    assert not planned["fits"]
    assert planned["pass"]["streamed_bytes"] <= planned["cpu_bytes"] + planned["disk_bytes"]
    assert not planned["pass"]["link_measured"]
    assert sum(unit["bytes"] for unit in planned["units"]) + planned["small_tensors_bytes"] == planned["total_bytes"]
    assert set(planned["device_map"].values()) == {0, "cpu", "disk"}


def test_a_plan_is_what_the_library_plans(config_70b: Path) -> None:
    planned = answer("plan", config_70b, "--max-memory", "0=20GiB,cpu=60GiB")
    with overspill.empty_weights():
        model = LlamaForCausalLM._from_config(LlamaConfig(**LLAMA_70B), dtype=torch.bfloat16)
    expected = overspill.plan(model, {0: "20GiB", "cpu": "60GiB"}, device="cuda:0")
    assert planned["device_map"] == expected.device_map
    assert planned["window_bytes"] == expected.window
    assert planned["pass"]["least_seconds"] == expected.predicted_seconds


def test_a_plan_for_people_is_the_table_with_a_verdict(config_70b: Path) -> None:
    shown = overspills("plan", config_70b, "--max-memory", "0=20GiB,cpu=60GiB").stdout
    assert "Plan for cuda:0: 131.42 GiB" in shown
    assert "a pass moves" in shown
    assert "It runs: " in shown
    assert "It fits: " in overspills("plan", config_70b, "--max-memory", "0=200GiB").stdout


def test_a_plan_may_mix_gpus_that_are_here_with_others(config_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(_: torch.device) -> float:
        raise AssertionError("a device was touched")

    monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("cuda:0")])
    monkeypatch.setattr(devices, "link_rate", touched)
    planned = answer("plan", config_70b, "--max-memory", "1=60GiB,0=30GiB,cpu=60GiB")
    assert planned["device"] == "cuda:0"
    assert set(planned["device_map"].values()) == {0, 1, "cpu"}
    assert planned["budgets"] == {"cuda:0": 30 << 30, "cuda:1": 60 << 30, "cpu": 60 << 30}


@pytest.mark.parametrize("here", [[], ["cuda:0"]], ids=["none is here", "one is here"])
def test_room_is_left_for_the_texts(config_70b: Path, monkeypatch: pytest.MonkeyPatch, here: list[str]) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: [torch.device(name) for name in here])
    budget = ["--max-memory", "0=40GiB,1=40GiB,cpu=200GiB"]
    planned = answer("plan", config_70b, *budget, "--context", 8192, "--batch", 4)
    cache = 80 * 2 * 8 * 128 * 2 * 8192 * 4  # layers, keys and values, heads, their width, bytes, tokens, texts
    assert planned["headroom"] == {"cuda:0": cache, "cuda:1": cache}
    assert planned["budgets"]["cuda:1"] == (40 << 30) - cache
    assert planned["resident_bytes"] < answer("plan", config_70b, *budget)["resident_bytes"]
    assert "leaves nothing of" in refusal(
        "plan", config_70b, "--max-memory", "0=1GiB,1=1GiB", "--context", 99999, code=1
    )
    assert "--batch has no effect" in refusal("plan", config_70b, *budget, "--batch", 2, code=2)


def test_a_plan_in_another_dtype_has_other_sizes(config_70b: Path) -> None:
    half, full = (answer("plan", config_70b, "--max-memory", "disk", "--dtype", d) for d in ("bf16", "float32"))
    assert full["total_bytes"] == pytest.approx(2 * half["total_bytes"], rel=1e-6)


def test_planning_seventy_billion_parameters_takes_little_more_than_to_build_them(config_70b: Path) -> None:
    def build() -> None:
        with torch.device("meta"):
            LlamaForCausalLM(LlamaConfig(**LLAMA_70B))

    def seconds(work: Any) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    build()  # what is imported then is nobody's work
    plain = min(seconds(build) for _ in range(2))
    planned = min(seconds(lambda: answer("plan", config_70b, "--max-memory", "0=20GiB,cpu=60GiB")) for _ in range(2))
    assert planned < 3 * plain


def test_a_picture_is_drawn_whole(config_70b: Path, tmp_path: Path) -> None:
    answer("plan", config_70b, "--max-memory", "0=20GiB", "--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "plan.png"]


def test_ctrl_c_while_a_picture_is_drawn_leaves_the_old_one(
    config_70b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: overspill.Plan, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    (tmp_path / "plan.png").write_bytes(b"old")
    monkeypatch.setattr(overspill.Plan, "plot", interrupted)
    result = overspills("plan", config_70b, "--max-memory", "0=20GiB", "--plot", tmp_path / "plan.png", "--json")
    assert (result.exit_code, result.output) == (130, "")
    assert (tmp_path / "plan.png").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "plan.png"]


def test_a_picture_in_no_known_format_is_refused_before_any_work(config_70b: Path) -> None:
    assert "Write plan.png" in refusal("plan", config_70b, "--plot", "plan.xyz", code=2)


def test_a_folder_with_only_a_config_can_be_planned(config_70b: Path) -> None:
    assert answer("plan", config_70b.parent, "--max-memory", "disk")["disk_bytes"] > 1e11


def test_a_config_without_a_dtype_is_planned_as_its_weights_are_stored(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    LlamaForCausalLM(config).half().save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    del document["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert next(skeleton_from_config(tmp_path, None).parameters()).dtype == torch.float16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", 'has no "model_type"'),
        ("not json", "is not valid JSON"),
        ('{"model_type": "never-heard-of"}', "cannot be read as the config of a model"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', "is quantized (gptq)"),
    ],
)
def test_a_config_that_describes_no_model_is_told(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert message in refusal("plan", tmp_path, "--max-memory", "disk", code=1)


def test_a_config_that_names_no_class_is_the_general_one_of_its_kind(config_70b: Path, tmp_path: Path) -> None:
    document = json.loads(config_70b.read_text())
    named = answer("plan", config_70b, "--max-memory", "disk")
    for architectures in (None, ["NeverHeardOf"]):
        (tmp_path / "config.json").write_text(json.dumps({**document, "architectures": architectures}))
        assert answer("plan", tmp_path, "--max-memory", "disk")["disk_bytes"] == named["disk_bytes"]
    with pytest.raises(PlanError, match=r"Transformers .* has no model for it"):
        model_class_of(PreTrainedConfig(), tmp_path)


def test_a_config_alone_without_a_dtype_is_planned_in_that_of_torch(config_70b: Path, tmp_path: Path) -> None:
    document = json.loads(config_70b.read_text())
    del document["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert next(skeleton_from_config(tmp_path, None).parameters()).dtype == torch.get_default_dtype()


def test_a_file_that_is_no_config_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert "notes.txt is no config. Give the config.json" in refusal("plan", tmp_path / "notes.txt", code=1)


def test_a_model_that_writes_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    message = refusal("run", tmp_path, "--prompt", PROMPT, code=1)
    assert "is a BertModel, which writes no text. Give a language model" in message


def test_a_prompt_without_tokens_is_told(llama: Path) -> None:
    assert "the prompt has no tokens" in refusal("run", llama, "--prompt", " ", code=1)


def test_interrupts_and_a_full_device_have_their_own_endings(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> Callable[[], None]:
        def command() -> None:
            raise error

        return command

    assert carried_out(raising(KeyboardInterrupt()), Output()) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == ""
    assert carried_out(raising(torch.OutOfMemoryError("CUDA out of memory")), Output()) == ExitCode.FAILED
    assert "the device ran out of memory. Give it less in --max-memory" in capsys.readouterr().err


def test_a_config_with_code_of_its_own_runs_none(tmp_path: Path) -> None:
    (tmp_path / "configuration.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal("plan", tmp_path, "--max-memory", "disk", code=1)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_config_says_what_is_missing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "has no config.json" in refusal("plan", tmp_path, code=1)


@pytest.mark.parametrize("arguments", [["plan"], ["inspect"], ["run", "--prompt", "x"], ["save", "out"]])
def test_a_misspelt_path_is_answered_with_near_ones(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "llama-8b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    name, *others = arguments
    assert "there is 'llama-8b'" in refusal(name, "models/lama-8b", *others, code=1)


def test_a_name_of_the_hub_without_a_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal("plan", "nobody-at-all/no-such-model", code=1)
    assert "there is no checkpoint at" in message
    assert "Nor could a config of the hub with this name be fetched" in message


# Run.


def resident(folder: Path, device: str = "cpu", **options: Any) -> str:
    """What the model writes when all of it is in memory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = aligned(LlamaForCausalLM.from_pretrained(folder)).to(device)
    inputs = tokenizer(PROMPT, return_tensors="pt").to(device)
    written = model.generate(**inputs, max_new_tokens=10, pad_token_id=1, **options)
    text: str = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("budget", ["disk", "cpu=6MiB", "cpu=1GiB"])
def test_the_text_is_the_resident_models(llama: Path, budget: str) -> None:
    ran = answer("run", llama, "--prompt", PROMPT, "--max-memory", budget, "--max-new-tokens", 10, "--device", "cpu")
    assert ran["text"] == resident(llama, do_sample=False)
    assert ran["prompt_tokens"] == 4
    assert ran["new_tokens"] == 10
    assert ran["tokens_per_second"] > 0
    assert ran["first_token_seconds"] > 0
    assert ran["peak_device_bytes"] is None
    assert bool(ran["disk_bytes"]) == (budget != "cpu=1GiB")


@pytest.mark.gpu
@pytest.mark.parametrize("budget", ["disk", "cpu=1GiB"])
def test_on_a_gpu_the_text_is_the_resident_models_there(llama: Path, budget: str) -> None:
    ran = answer("run", llama, "--prompt", PROMPT, "--max-memory", budget, "--max-new-tokens", 10, "--device", 0)
    assert ran["text"] == resident(llama, "cuda:0", do_sample=False)
    assert ran["peak_device_bytes"] > 0
    assert bool(ran["disk_bytes"]) == (budget == "disk")


@pytest.mark.gpu
def test_on_a_gpu_the_command_runs_in_a_process_that_has_not_used_it_yet(llama: Path) -> None:
    options = ["--prompt", PROMPT, "--max-memory", "cpu=1GiB", "--max-new-tokens", "3", "--device", "0", "--json"]
    command = [sys.executable, "-W", "error", "-m", "overspill", "run", f"{llama}", *options]
    ran = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    assert ran["new_tokens"] == 3
    assert ran["peak_device_bytes"] > 0


def test_what_the_model_remembers_of_the_text_is_within_the_budget(llama: Path) -> None:
    def ran(tokens: int, budget: str) -> Any:
        options = ["--prompt", PROMPT, "--max-new-tokens", tokens, "--max-memory", budget, "--device", "cpu"]
        return answer("run", llama, *options)

    a_token = 4 * 2 * 2 * 64 * 4  # layers, keys and values, heads, their width, bytes
    short, long = ran(2, "cpu=15600KiB"), ran(100, "cpu=15600KiB")
    assert (short["headroom"], long["headroom"]) == ({"cpu": 6 * a_token}, {"cpu": 104 * a_token})
    assert short["disk_bytes"] == 0
    assert long["disk_bytes"] > 0
    assert ran(2, "disk")["headroom"] == {}  # no budget that it could count in
    message = refusal("run", llama, "--prompt", PROMPT, "--max-new-tokens", 10**6, "--max-memory", "cpu=1GiB", code=1)
    assert "with that for the cache, leaves nothing of the 1.00 GiB for cpu" in message


def test_a_model_without_keys_and_values_runs_within_a_budget(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = transformers.MambaConfig(
        vocab_size=len(tokenizer), hidden_size=64, state_size=4, num_hidden_layers=2, bos_token_id=1, eos_token_id=1
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    ran = answer("run", tmp_path, "--prompt", PROMPT, "--max-new-tokens", 2, "--max-memory", "cpu=1GiB")
    assert ran["headroom"] == {}


def test_the_peak_of_memory_is_seen_though_it_is_freed_again() -> None:
    gc.collect()  # what other tests left would be freed meanwhile, and be counted off
    with PeakMemory(torch.device("cpu")) as peak:
        held = torch.ones(200 << 20, dtype=torch.uint8)
        time.sleep(0.1)
        del held
    assert 150 << 20 < peak.host < 300 << 20


def test_a_seeded_sample_is_the_resident_models(llama: Path) -> None:
    options = [
        "--prompt",
        PROMPT,
        "--max-memory",
        "disk",
        "--max-new-tokens",
        10,
        "--temperature",
        2,
        "--device",
        "cpu",
    ]
    ran = answer("run", llama, *options, "--seed", 5)
    torch.manual_seed(5)
    assert ran["text"] == resident(llama, do_sample=True, temperature=2.0)
    assert answer("run", llama, *options, "--seed", 6)["text"] != ran["text"]


def test_streamed_text_is_the_same_and_what_it_took_comes_on_stderr(llama: Path) -> None:
    options = ["--prompt", PROMPT, "--max-memory", "disk", "--max-new-tokens", 10]
    streamed, whole = (overspills("run", llama, *options, flag) for flag in ("--stream", "--no-stream"))
    assert streamed.stdout == whole.stdout == resident(llama, do_sample=False) + "\n"
    for result in (streamed, whole):
        assert "4 tokens in, 10 out: the first after " in result.stderr
        assert "tokens/s" in result.stderr
        assert "peak memory: " in result.stderr


def test_words_come_while_the_model_still_writes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int]] = []
    passes = []
    forward = LlamaForCausalLM.forward

    def counting(self: Any, *given: Any, **named: Any) -> Any:
        passes.append(1)
        return forward(self, *given, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counting)
    tokenizer, model = generating.tokenizer_of(llama), LlamaForCausalLM.from_pretrained(llama)
    inputs = generating.encode(tokenizer, PROMPT, chat=False, path=llama)
    sampling = generating.Sampling(max_new_tokens=6)
    generating.generate(model, tokenizer, inputs, sampling, lambda text: shown.append((text, len(passes))))
    assert next(count for text, count in shown if text) < 6


def test_with_json_the_stream_goes_to_stderr(llama: Path) -> None:
    result = overspills(
        "run", llama, "--prompt", PROMPT, "--max-memory", "disk", "--max-new-tokens", 5, "--stream", "--json"
    )
    assert json.loads(result.stdout)["text"] in result.stderr


def test_a_question_is_put_by_the_chat_template(llama: Path, tmp_path: Path) -> None:
    answer("save", llama, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{% for m in messages %}so {{ m['content'] }}{% endfor %}")
    options = ["--prompt", PROMPT, "--max-memory", "disk", "--max-new-tokens", 2, "--chat"]
    assert answer("run", tmp_path / "chat", *options)["prompt_tokens"] == 5
    assert "has no chat template" in refusal("run", llama, *options, code=1)


def test_a_seed_without_a_temperature_is_refused(llama: Path) -> None:
    assert "--seed has no effect" in refusal("run", llama, "--prompt", "x", "--seed", 1, code=2)


def test_a_model_without_a_tokenizer_says_what_is_missing(llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama / name)
    assert "has no tokenizer that can be read" in refusal("run", tmp_path, "--prompt", "x", code=1)


def test_weights_of_another_model_are_named_by_their_keys(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    save_file({"transformer.h.0.attn.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for arguments in (["run", tmp_path, "--prompt", "once", "--max-memory", "disk"],):
        message = refusal(*arguments, code=1)
        assert "transformer.h.0.attn.weight" in message
        assert "model.embed_tokens.weight" in message
    result = overspills("inspect", tmp_path, "--model")
    assert result.exit_code == 3
    assert "model.embed_tokens.weight" in result.stdout


def test_a_config_without_weights_cannot_run(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    assert "holds no checkpoint" in refusal("run", tmp_path, "--prompt", "once", "--max-memory", "disk", code=1)


def test_ctrl_c_ends_with_130(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("overspill.cli.run.generate", interrupted)
    result = overspills("run", llama, "--prompt", PROMPT, "--max-memory", "disk")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


@pytest.mark.parametrize("output", ["--stream", "--json"])
def test_ctrl_c_while_it_writes_leaves_no_files_and_no_half_of_an_answer(
    llama: Path, tmp_path: Path, output: str
) -> None:
    options = ["--prompt", PROMPT, "--max-memory", "disk", "--device", "cpu", "--dtype", "bf16"]
    process = command(
        "run", llama, *options, "--max-new-tokens", 10**5, "--stream", output, environment={"TMPDIR": str(tmp_path)}
    )
    words = process.stderr if output == "--json" else process.stdout
    assert words is not None
    assert words.read(5)
    assert list(tmp_path.glob("overspill-*/tensors.bin"))  # in another dtype than it is stored: converted first
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert output != "--json" or stdout == ""
    assert list(tmp_path.iterdir()) == []


# Inspect.


def test_a_sound_checkpoint_is_shown_with_alike_tensors_in_one_line(llama: Path) -> None:
    shown = " ".join(overspills("inspect", llama).stdout.split())
    assert "model.layers.*.mlp.up_proj.weight (4) [1024, 256] float32 4.00 MiB" in shown
    assert "No problems found." in shown
    assert "model.layers.3.mlp.up_proj.weight" in overspills("inspect", llama, "--tensors").stdout
    assert overspills("inspect", llama, "--model").exit_code == 0


def test_the_json_of_an_inspection_has_every_tensor(llama: Path) -> None:
    found = answer("inspect", llama)
    state = load_file(llama / "model.safetensors")
    assert {tensor["name"]: tensor["shape"] for tensor in found["tensors"]} == {
        n: list(t.shape) for n, t in state.items()
    }
    assert found["bytes_by_dtype"] == {"float32": sum(tensor.nbytes for tensor in state.values())}
    assert found["ok"]
    assert found["problems"] == []


def test_a_damaged_checkpoint_exits_with_3_and_shows_what_is_sound(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.ones(4)}, tmp_path / f"{name}.safetensors")
    with (tmp_path / "b.safetensors").open("r+b") as file:
        file.truncate(20)
    result = overspills("inspect", tmp_path)
    assert result.exit_code == 3
    assert "a.safetensors" in result.stdout
    assert "error: " in result.stdout
    assert "is truncated" in result.stdout
    document = json.loads(overspills("inspect", tmp_path, "--json").stdout)
    assert not document["ok"]
    assert [problem["severity"] for problem in document["problems"]] == ["error"]


def test_a_name_cannot_command_the_terminal(tmp_path: Path) -> None:
    save_file({"\x1b[2Jgone": torch.ones(1), "[red]plain[/red]": torch.ones(1)}, tmp_path / "model.safetensors")
    shown = overspills("inspect", tmp_path, "--tensors").stdout
    assert "\x1b" not in shown
    assert "\\x1b[2Jgone" in shown
    assert "[red]plain[/red]" in shown


def test_a_reader_that_goes_away_is_no_error_worth_a_traceback(tmp_path: Path) -> None:
    save_file({f"layer.{n}.x{n}": torch.ones(1) for n in range(3000)}, tmp_path / "model.safetensors")
    process = command("inspect", tmp_path, "--tensors")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert complaint == ""


# Save.


def test_a_saved_checkpoint_is_one_that_transformers_loads(llama: Path, tmp_path: Path) -> None:
    written = answer("save", llama, tmp_path / "out", "--max-shard-size", "3MB", "--dtype", "bf16")
    assert written["files"] > 1
    assert written["cast"] == written["tensors"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    original = LlamaForCausalLM.from_pretrained(llama)
    assert loaded.dtype == torch.bfloat16
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name
    assert "tokenizer.json" in written["copied"]


@pytest.mark.parametrize(
    "option",
    [["--max-shard-size", "0"], ["--max-shard-size", "lots"], ["--dtype", "int8"], ["--dtype", "float8_e4m3fn"]],
)
def test_sizes_and_dtypes_that_make_no_sense_are_refused(llama: Path, tmp_path: Path, option: list[str]) -> None:
    assert "Write, for example" in refusal("save", llama, tmp_path / "out", *option, code=2)
    assert not (tmp_path / "out").exists()


def test_a_cast_that_overflows_warns_on_stderr(tmp_path: Path) -> None:
    save_file({"large": torch.tensor([1e9])}, tmp_path / "model.safetensors")
    result = overspills("save", tmp_path, tmp_path / "out", "--dtype", "float16")
    assert result.exit_code == 0
    assert "large held values too large for float16" in result.stderr


def test_ctrl_c_during_a_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    size = 4 << 30  # a hole, which reads as zeros: it takes no room, and some seconds to cast
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    save_file({"old": torch.ones(1)}, target / "model.safetensors")
    before = (target / "model.safetensors").read_bytes()
    process = command("save", source, target, "--dtype", "bf16")
    while not list(target.glob("*.overspill-*.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert stdout == ""
    assert stderr == "overspill: stopping; what was written is removed\n"
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == before


# Bench.


@pytest.mark.parametrize("peer", [None, "accelerate"])
def test_a_bench_puts_each_figure_beside_its_line_and_leaves_no_file(tmp_path: Path, peer: str | None) -> None:
    options = ["--peer", peer] if peer else []
    measured = answer("bench", "--size", "32MiB", "--folder", tmp_path, "--device", "cpu", *options)
    assert measured["bytes"] == 32 << 20
    assert measured["bytes_per_second"]["page_cache"] > 0
    assert measured["bytes_per_second"]["link"] is None
    works = {figure["work"]: figure for figure in measured["figures"]}
    assert "a pass, all weights on disk, in the page cache" in works
    for figure in works.values():
        assert figure["of_line"] == pytest.approx(figure["line_seconds"] / figure["median_seconds"])
        assert len(figure.get("accelerate_seconds", [])) == (len(figure["seconds"]) if peer else 0)
    assert list(tmp_path.iterdir()) == []


def test_a_disks_rate_is_of_all_bytes_of_all_files_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"large": 2 * CHUNK + 5, "small": 7, "empty": 0}
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    preadv, read = os.preadv, []

    def noting(descriptor: int, buffers: Any, offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read.append((os.fstat(descriptor).st_size, offset, count))
        return count

    monkeypatch.setattr(os, "preadv", noting)
    assert read_rate([tmp_path / name for name in sizes]) > 0
    large = 2 * CHUNK + 5
    assert sorted(read) == [(7, 0, 7), (large, 0, CHUNK), (large, CHUNK, CHUNK), (large, 2 * CHUNK, 5)]


@pytest.mark.gpu
def test_a_bench_on_a_gpu_measures_its_link(tmp_path: Path) -> None:
    measured = answer("bench", "--size", "64MiB", "--folder", tmp_path, "--device", 0, "--peer", "accelerate")
    assert measured["bytes_per_second"]["link"] > 0
    assert any("in CPU memory" in figure["work"] for figure in measured["figures"]), measured["figures"]
    assert all(figure["median_seconds"] > 0 for figure in measured["figures"])
    assert list(tmp_path.iterdir()) == []


def test_a_bench_for_people_names_its_lines(tmp_path: Path) -> None:
    shown = overspills("bench", "--size", "32MiB", "--folder", tmp_path, "--device", "cpu").stdout
    assert "disk, through the page cache" in shown
    assert "set by" in shown


def test_ctrl_c_during_a_bench_leaves_no_file(tmp_path: Path) -> None:
    process = command("bench", "--size", "1GiB", "--folder", tmp_path, "--device", "cpu")
    while not list(tmp_path.glob("*/model.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout, stderr) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_size_too_small_to_measure_is_refused() -> None:
    assert "Write 32.00 MiB or more" in refusal("bench", "--size", "1MiB", "--device", "cpu", code=2)
