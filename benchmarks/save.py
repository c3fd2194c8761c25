"""How fast, and in how much memory, a mixture of experts that lies on disk is loaded and saved, beside Transformers.

    PYTHONPATH=src python3 benchmarks/save.py --out results.json

A model of 3.4 GB, all of it on disk, whose experts Transformers fuses: 16 layers of 16 experts. Each contender has a
process of its own, in turns. The line is a sequential write of the same bytes to the same disk, put there for good,
as ours are; a peer's files are put there too, on the clock. Ends with status 1 when a promise was not kept.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from common import GB, Check, Row, Timing, environment, report, table
from lines import cached_rate, filesystem, on_disk
from safetensors import safe_open
from safetensors.torch import save_file

import overspill

MB: Final = 1e6
GROWTH: Final = 300 * MB
CHILDREN: Final = ("ours", "ours, fused", "Transformers")


def config(layers: int) -> Any:
    """A Qwen3 mixture of experts."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=4096,
        moe_intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=16,
        num_experts_per_tok=2,
        dtype=torch.bfloat16,
    )


def write_checkpoint(folder: Path, layers: int) -> int:
    """Random weights by the names and shapes of a published checkpoint, a shard a layer. Returns the bytes of them."""
    from transformers import Qwen3MoeForCausalLM

    with overspill.empty_weights():
        model = Qwen3MoeForCausalLM._from_config(config(layers))
    specs = overspill.state_dict(_filled(model)).specs()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    noise = torch.randn(1 << 20).to(torch.bfloat16)
    weight_map, nbytes = {}, 0
    for name, spec in specs.items():
        part = name.split(".")[2] if ".layers." in name else "rest"
        values = noise.repeat(-(-spec.numel // noise.numel()))[: spec.numel].view(spec.shape).clone()
        values.view(-1)[0] = len(weight_map)  # no two alike
        shards.setdefault(part, {})[name] = values
        weight_map[name] = f"model-{part}.safetensors"
        nbytes += spec.nbytes
        if part != "rest" and len(shards[part]) == sum(name_.startswith(f"model.layers.{part}.") for name_ in specs):
            save_file(shards.pop(part), folder / f"model-{part}.safetensors", metadata={"format": "pt"})
    save_file(shards.pop("rest"), folder / "model-rest.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config.save_pretrained(folder)
    return nbytes


def _filled(model: Any) -> Any:
    """The skeleton with parameters that have values, all of them the same zero: shapes are all that is asked for."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = torch.nn.Parameter(zeros, requires_grad=False)
    return model


# ---------------------------------------------------------------- one contender, in a process of its own


def child(name: str, checkpoint: Path, out: Path) -> None:
    """Load the model to disk, and save it. Prints what that took."""
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # starting CUDA takes 25 MB by itself (H200), which is not the load
    load: Callable[[], Any]
    save: Callable[[Any], Any]
    if name == "Transformers":
        offload = out.with_name("offload")
        every = {"model.embed_tokens": "disk", "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
        layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
        every |= {f"model.layers.{index}": "disk" for index in range(layers)}

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(checkpoint, device_map=every, offload_folder=offload)

        def save(model: Any) -> None:
            model.save_pretrained(out)
            _put_on_disk(out)
    else:
        from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401  # off the clock

        def load() -> Any:
            return overspill.from_pretrained(AutoModelForCausalLM, checkpoint, max_memory={}, progress=False)

        def save(model: Any) -> None:
            overspill.save(model, out, original_format=name == "ours", progress=False)

    with Watch() as loading:
        model = load()
    with Watch() as saving:
        save(model)
    print(json.dumps({"load": vars(loading), "save": vars(saving)}))


class Watch:
    """Seconds, and the most memory that is no file's over what was held before."""

    def __enter__(self) -> "Watch":
        self.growth, self.seconds = 0, 0.0
        done, before = threading.Event(), _held()

        def watch() -> None:
            while not done.wait(0.002):
                self.growth = max(self.growth, _held() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        start = time.perf_counter()

        def end() -> None:
            self.seconds = time.perf_counter() - start
            done.set()
            thread.join()

        self.__dict__["_end"] = end
        return self

    def __exit__(self, *exception: object) -> None:
        self.__dict__.pop("_end")()


def _held() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _put_on_disk(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# ---------------------------------------------------------------- the rows


def write_line(folder: Path, nbytes: int) -> float:
    """Seconds of a sequential write of `nbytes`, put on the disk."""
    block = memoryview(bytearray(os.urandom(1 << 20) * 16))
    path = folder / "line"
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-nbytes // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def run(folder: Path, layers: int, turns: int) -> list[Row]:
    """All contenders in turns, the line between them."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    nbytes = write_checkpoint(checkpoint, layers)
    files = sorted(checkpoint.glob("*.safetensors"))
    print(f"checkpoint: {nbytes / GB:.2f} GB in {len(files)} files", flush=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CHILDREN}
    lines: list[float] = []
    same: dict[str, bool] = {}
    for _ in range(turns):
        for name in CHILDREN:
            cached_rate(files)
            os.sync()
            lines.append(write_line(folder, nbytes))
            found[name].append(_run_child(name, checkpoint, folder / "out"))
            if name not in same:
                same[name] = name == "ours, fused" or _same(checkpoint, folder / "out")
            for left in ("out", "offload"):
                shutil.rmtree(folder / left, ignore_errors=True)
    return [_row(name, nbytes, found, lines, same) for name in CHILDREN[:2]]


def _run_child(name: str, checkpoint: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--folder", str(checkpoint), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"    {name}: {answer}", flush=True)
    return answer


def _same(checkpoint: Path, out: Path) -> bool:
    """Whether both folders hold the same tensors, bit for bit."""
    kept = {name: file for file in sorted(out.glob("*.safetensors")) for name in _names(file)}
    names = {name for file in checkpoint.glob("*.safetensors") for name in _names(file)}
    if kept.keys() != names:
        return False
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as theirs:
            for name in _names(file):
                with safe_open(kept[name], "pt") as ours:
                    if not torch.equal(ours.get_tensor(name), theirs.get_tensor(name)):
                        return False
    return True


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _row(
    name: str, nbytes: int, found: dict[str, list[dict[str, Any]]], lines: list[float], same: dict[str, bool]
) -> Row:
    ours = Timing(tuple(each["save"]["seconds"] for each in found[name]))
    theirs = Timing(tuple(each["save"]["seconds"] for each in found["Transformers"]))
    line = statistics.median(lines)
    growth = {who: max(each["save"]["growth"] for each in found[who]) for who in (name, "Transformers")}
    loading = {who: max(each["load"]["growth"] for each in found[who]) for who in (name, "Transformers")}
    return Row(
        name=name,
        what=f"save {nbytes / GB:.2f} GB, all on disk, {'fused' if 'fused' in name else 'as it was loaded'}",
        ours=ours,
        line=line,
        line_is=f"a sequential write, {nbytes / line / GB:.2f} GB/s ({min(lines):.2f}–{max(lines):.2f} s)",
        peer=theirs,
        peer_is="Transformers",
        targets=[
            Check.at_least("≥ 80 % of the sequential write", line / ours.median, 0.8, "%"),
            Check.at_least("faster than Transformers", theirs.median / ours.median, 1.0),
            Check.at_most("memory grows by < 300 MB in a save", growth[name] / MB, GROWTH / MB, "MB"),
            Check.at_most("memory grows by < 300 MB in a load", loading[name] / MB, GROWTH / MB, "MB"),
        ],
        checks=[Check("same bits as what was loaded", "yes" if same[name] else "no", same[name])],
        details={
            "load, s": statistics.median(each["load"]["seconds"] for each in found[name]),
            "load, Transformers, s": statistics.median(each["load"]["seconds"] for each in found["Transformers"]),
            "memory growth of a save, Transformers, MB": growth["Transformers"] / MB,
            "memory growth of a load, Transformers, MB": loading["Transformers"] / MB,
            "Transformers' same bits": same["Transformers"],
        },
    )


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="a smaller model, to try the benchmark itself")
    parser.add_argument("--turns", type=int, default=3, help="how often each contender saves")
    parser.add_argument("--folder", help="where the checkpoint goes; it must be a disk, not memory")
    parser.add_argument("--out", help="a JSON file for all figures")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, Path(arguments.folder), Path(arguments.out))
        return 0
    candidates = [Path(arguments.folder)] if arguments.folder else [Path(tempfile.gettempdir()), Path.cwd()]
    parent = on_disk(candidates, 14 << 30)
    facts = environment() | {"file system": f"{filesystem(parent)} at {parent}"}
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="overspill-", dir=parent) as folder:
        rows = run(Path(folder), arguments.layers, arguments.turns)
    for row in rows:
        print(f"\n{report(row)}")
    print(f"\n{table(rows)}")
    if arguments.out:
        results = {"environment": facts, "rows": [row.as_json() for row in rows]}
        Path(arguments.out).write_text(json.dumps(results, indent=2))
    return int(any(not check.met for row in rows for check in row.all_checks))


if __name__ == "__main__":
    raise SystemExit(main())
