import functools
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from overspill.checkpoint import open_checkpoint
from overspill.errors import CheckpointChangedError, SaveError
from overspill.resharding import reshard
from support import run_program

State = dict[str, torch.Tensor]


@functools.cache
def state() -> State:
    """Every kind of tensor that a checkpoint holds, in sizes that leave others unaligned."""
    return {
        "odd": torch.randn(3, dtype=torch.bfloat16),
        "layers.0.weight": torch.randn(64, 33),
        "layers.1.weight": torch.randn(64, 33),
        "half": torch.randn(7, 5).half(),
        "double": torch.randn(11, dtype=torch.float64),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "ids": torch.arange(12),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5),
    }


def stored(folder: Path) -> State:
    found: State = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_bits(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        assert tensor.view(-1).view(torch.uint8).equal(other[name].view(-1).view(torch.uint8)), name


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Transformers folder: weights, config, tokenizer, and things that are none of a checkpoint's."""
    folder = tmp_path / "source"
    (folder / "templates").mkdir(parents=True)
    save_file(state(), folder / "model.safetensors", metadata={"format": "pt", "made_by": "a test"})
    config = {"model_type": "llama", "torch_dtype": "float32", "text_config": {"dtype": "float32", "layers": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "templates" / "chat.jinja").write_text("hello")
    return folder


def test_a_checkpoint_in_other_shards_has_the_same_bits(source: Path, tmp_path: Path) -> None:
    written = reshard(source, tmp_path / "out", max_shard_size="10KB", progress=False)
    assert written.files == len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same_bits(stored(tmp_path / "out"), state())
    assert open_checkpoint(tmp_path / "out").keys() == state().keys()
    back = reshard(tmp_path / "out", tmp_path / "back", progress=False)
    assert back.files == 1
    assert_same_bits(stored(tmp_path / "back"), state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_cast_is_that_of_torch_and_leaves_other_numbers_alone(
    source: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    written = reshard(source, tmp_path / "out", dtype=dtype, progress=False)
    expected = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state().items()}
    assert_same_bits(stored(tmp_path / "out"), expected)
    assert written.cast == sum(value.is_floating_point() and value.dtype != dtype for value in state().values())


def test_a_tensor_larger_than_a_chunk_is_cast_as_a_whole(tmp_path: Path) -> None:
    value = torch.randn(5_000_001)  # 20 MB, read in chunks of 16 MiB
    save_file({"large": value}, tmp_path / "model.safetensors")
    reshard(tmp_path / "model.safetensors", tmp_path / "out", dtype=torch.bfloat16, progress=False)
    assert_same_bits(stored(tmp_path / "out"), {"large": value.bfloat16()})


def test_values_that_a_cast_makes_infinite_are_told(tmp_path: Path) -> None:
    tensors = {"large": torch.tensor([1e6, 1.0]), "infinite": torch.tensor([float("inf")]), "small": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    written = reshard(tmp_path / "model.safetensors", tmp_path / "out", dtype=torch.float16, progress=False)
    assert written.overflowed == ("large",)


def test_bytes_that_stay_as_they_are_never_enter_this_process(
    source: Path, tmp_path: Path, moved: Counter[str]
) -> None:
    header = int.from_bytes((source / "model.safetensors").read_bytes()[:8], "little")
    reshard(source, tmp_path / "out", progress=False)
    assert moved["disk"] == 8 + header


def test_a_pickled_checkpoint_becomes_safetensors(tmp_path: Path) -> None:
    tensors = {name: value for name, value in state().items() if name != "fp8"}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    reshard(tmp_path / "pytorch_model.bin", tmp_path / "out", progress=False)
    assert_same_bits(stored(tmp_path / "out"), tensors)


def test_the_folder_of_the_source_can_be_the_destination(source: Path) -> None:
    before = listing(source)
    reshard(source, source, max_shard_size="3KB", dtype=torch.float16, progress=False)
    after = listing(source)
    expected = {name: value.half() if value.is_floating_point() else value for name, value in state().items()}
    assert_same_bits(stored(source), expected)
    assert "model.safetensors" not in after
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert json.loads(after["config.json"])["torch_dtype"] == "float16"


def test_config_tokenizer_and_templates_go_along(source: Path, tmp_path: Path) -> None:
    written = reshard(source, tmp_path / "out", progress=False)
    assert written.copied == ("config.json", "templates/chat.jinja", "tokenizer.json")
    for name in written.copied:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert len(listing(tmp_path / "out")) == 4, "nothing else is left there"


def test_the_config_names_the_dtype_that_the_weights_have_now(source: Path, tmp_path: Path) -> None:
    reshard(source, tmp_path / "out", dtype=torch.bfloat16, progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "layers": 2},
    }


def test_a_config_without_a_dtype_gets_one(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text('{"model_type": "llama"}')
    reshard(source, tmp_path / "out", dtype=torch.bfloat16, progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}


def test_other_weights_and_hidden_files_stay_and_are_named(source: Path, tmp_path: Path) -> None:
    for name in ("optimizer.pt", "model.gguf", "onnx/model.onnx", "onnx/config.json", ".git/HEAD"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"0")
    written = reshard(source, tmp_path / "out", progress=False)
    assert written.left_out == ("model.gguf", "onnx/", "optimizer.pt")
    assert written.copied == ("config.json", "templates/chat.jinja", "tokenizer.json")


def test_links_are_followed_as_the_hubs_cache_has_them(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).symlink_to(source / name)
    reshard(snapshot, tmp_path / "out", progress=False)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert_same_bits(stored(tmp_path / "out"), state())


def test_a_checkpoint_can_be_saved_inside_its_source(source: Path) -> None:
    (source / "half").mkdir()
    written = reshard(source, source / "half", dtype=torch.float16, progress=False)
    assert written.copied == ("config.json", "templates/chat.jinja", "tokenizer.json")
    assert written.left_out == ()
    assert_same_bits(stored(source), state())


def test_a_file_alone_brings_no_other_files(source: Path, tmp_path: Path) -> None:
    written = reshard(source / "model.safetensors", tmp_path / "out", progress=False)
    assert written.copied == ()
    assert listing(tmp_path / "out").keys() == {"model.safetensors"}


def test_what_the_headers_say_beside_the_tensors_is_kept(source: Path, tmp_path: Path) -> None:
    reshard(source, tmp_path / "out", max_shard_size="10KB", progress=False)
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "made_by": "a test"}


def test_metadata_that_differs_between_shards_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors", metadata={"shard": name, "by": "us"})
    reshard(tmp_path, tmp_path / "out", progress=False)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "by": "us"}
    assert "'shard'" in caplog.text


def test_a_quantized_checkpoint_is_not_cast(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(SaveError, match=r"quantized model.*Save it without a dtype"):
        reshard(source, tmp_path / "out", dtype=torch.bfloat16, progress=False)
    assert not (tmp_path / "out").exists()
    reshard(source, tmp_path / "out", progress=False)
    assert_same_bits(stored(tmp_path / "out"), state())


def test_a_folder_with_other_things_is_not_written_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(SaveError, match=r"letter\.txt and no checkpoint"):
        reshard(source, tmp_path / "mine", progress=False)
    assert listing(tmp_path / "mine") == {"letter.txt": b"dear"}


def test_a_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(SaveError, match="holds no tensors"):
        reshard(tmp_path, tmp_path / "out", progress=False)


class StopError(Exception):
    pass


def stopping_at(step: int) -> tuple[list[int], object]:
    steps: list[int] = []

    def go_on() -> None:
        steps.append(len(steps))
        if len(steps) == step:
            raise StopError

    return steps, go_on


@pytest.mark.parametrize("existing", [False, True], ids=["new", "over another"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["copied", "cast"])
def test_whenever_it_is_stopped_nothing_of_it_remains(
    source: Path, tmp_path: Path, dtype: torch.dtype | None, existing: bool
) -> None:
    target = tmp_path / "deep" / "out"
    if existing:
        target.mkdir(parents=True)
        save_file({"old": torch.ones(3)}, target / "model.safetensors")
        (target / "config.json").write_text("{}")
    before = listing(tmp_path)
    steps, go_on = stopping_at(10**9)
    reshard(source, tmp_path / "whole", max_shard_size="10KB", dtype=dtype, progress=False, go_on=go_on)
    shutil.rmtree(tmp_path / "whole")
    assert len(steps) >= 8
    for step in range(1, len(steps) + 1):
        _, go_on = stopping_at(step)
        with pytest.raises(StopError):
            reshard(source, target, max_shard_size="10KB", dtype=dtype, progress=False, go_on=go_on)
        assert listing(tmp_path) == before
        assert target.parent.exists() == existing


def test_a_source_that_changes_meanwhile_is_noticed(source: Path, tmp_path: Path) -> None:
    def go_on() -> None:
        with (source / "model.safetensors").open("ab") as file:
            file.write(b"more")

    with pytest.raises(CheckpointChangedError):
        reshard(source, tmp_path / "out", progress=False, go_on=go_on)
    assert not (tmp_path / "out").exists()


def test_what_a_killed_save_left_goes_with_the_next(source: Path, tmp_path: Path) -> None:
    reshard(source, tmp_path / "out", progress=False)
    left = tmp_path / "out" / ".overspill-companions-abcdefgh"
    left.mkdir()
    (left / "config.json").write_text("{}")
    reshard(source, tmp_path / "out", progress=False)
    assert not left.exists()


def test_a_file_that_cannot_be_copied_leaves_no_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28), str(source / "config.json"))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(SaveError, match=r"cannot copy .*config\.json.*No space left"):
        reshard(source, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [100_000_000], "data_offsets": [0, 400_000_000]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 400_000_000)  # a hole, which reads as zeros
    program = f"""
        import torch
        from memory_watch import held
        from overspill.resharding import reshard

        most = [0]

        def go_on():
            most.append(held())

        for dtype in (torch.bfloat16, None):
            before = held()
            most[:] = [before]
            reshard("{tmp_path}", "{tmp_path}/out", dtype=dtype, progress=False, go_on=go_on)
            print(len(most), max(most) - before)
    """
    cast, copied = ([int(word) for word in line.split()] for line in run_program(program).splitlines())
    assert cast[0] > 20, "it was not looked at while it worked"
    assert cast[1] < 160e6  # a few chunks, and what the allocator keeps of them
    assert copied[1] < 20e6
