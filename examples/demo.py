"""Run a model several times larger than the memory it is given, and see that nothing is lost on the way.

A random Llama of some 400 MB is saved to a temporary folder. overspill plans it within 80 MB, loads it, and runs it on
whatever this machine computes with: a GPU, else the CPU. Its output must equal the resident model's, bit for bit.
"""

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from torch import nn

import overspill

BUDGET = "80MB"
HOST_BUDGET = "120MB"  # where a GPU computes: what fits neither here nor there stays on disk
WIDTH, LAYERS, VOCABULARY, TOKENS = 512, 30, 8192, 16
PASSES = 5
DEVICE = torch.device(0 if torch.accelerator.is_available() else "cpu")
MB = 1e6


def main() -> int:
    """The three steps: make a checkpoint, plan, load and run."""
    print(f"overspill {overspill.__version__} on {DEVICE.type}, torch {torch.__version__}\n")
    with tempfile.TemporaryDirectory(prefix="overspill-demo-") as folder:
        # In a process of its own, so that the memory of the resident model is none of ours.
        subprocess.run([sys.executable, __file__, folder], check=True)
        return 0 if show(Path(folder)) else 1


def show(folder: Path) -> bool:
    """Plan, load and run the checkpoint in `folder`. Whether the output was the resident model's."""
    with overspill.empty_weights():
        model = build()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    print(f"1. A checkpoint of {nbytes / MB:.0f} MB, and a budget of {BUDGET}.\n")

    budget: dict[int | str, str] = {"cpu": BUDGET} if DEVICE.type == "cpu" else {0: BUDGET, "cpu": HOST_BUDGET}
    plan = overspill.plan(model, budget)
    print("2. " + textwrap.indent(str(plan), "   ").lstrip() + "\n")

    with peak_memory() as peak:
        seconds = [timed(lambda: overspill.load(model, folder / "checkpoint", plan))]
        seconds += [timed(lambda: run(model)) for _ in range(PASSES)]
    print(f"3. Loaded in {seconds[0]:.2f} s; a pass of {TOKENS} tokens takes {min(seconds[1:]):.2f} s.")
    print(f"   {peak()}, for a model of {nbytes / MB:.0f} MB.\n")

    same = torch.equal(run(model), torch.load(folder / "reference.pt"))
    verdict = "equals" if same else "DIFFERS FROM"
    print(f"4. The output {verdict} that of the same model held wholly in memory, bit for bit.")
    return same


def build() -> nn.Module:
    """A Llama where Transformers is installed, else a stack of torch's own transformer layers."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        layers = [nn.TransformerEncoderLayer(WIDTH, 8, 1408, batch_first=True) for _ in range(LAYERS)]
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY)).eval()
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        intermediate_size=1408,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    model: nn.Module = LlamaForCausalLM(config).eval()
    return model


def run(model: nn.Module) -> torch.Tensor:
    """The logits of one pass."""
    ids = torch.arange(TOKENS, device=DEVICE).unsqueeze(0) * 37 % VOCABULARY
    with torch.no_grad():
        output = model(ids)
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits.cpu()


def make_checkpoint(folder: Path) -> None:
    """Save a random model, run it wholly in memory, and keep what came out."""
    torch.manual_seed(0)
    model = build()
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    try:
        from safetensors.torch import save_file
    except ImportError:
        torch.save(model.state_dict(), checkpoint / "pytorch_model.bin")
    else:
        save_file(model.state_dict(), checkpoint / "model.safetensors")
    torch.save(run(model.to(DEVICE)), folder / "reference.pt")


def timed(call: Callable[[], object]) -> float:
    """Seconds that `call` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def peak_memory() -> Iterator[Callable[[], str]]:
    """Watch the memory that weights take; the result says afterwards how much that was."""
    if DEVICE.type != "cpu":
        module = torch.get_device_module(DEVICE)
        torch.ones(8, 8, device=DEVICE) @ torch.ones(8, 8, device=DEVICE)  # its workspace is no weight
        held = module.memory_allocated()
        module.reset_peak_memory_stats()
        yield lambda: f"The GPU held {(module.max_memory_allocated() - held) / MB:.0f} MB at most"
        return
    start = most = own_memory()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: f"The process grew by {(most - start) / MB:.0f} MB at most"
    finally:
        done.set()
        watcher.join()


def own_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: files that are mapped count too
        import psutil

        return int(psutil.Process().memory_info().rss)
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make_checkpoint(Path(sys.argv[1]))
    else:
        raise SystemExit(main())
