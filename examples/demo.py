"""Have a language model answer within a fraction of the memory that it takes, and see that nothing is lost on the way.

`make demo` runs this with SmolLM2-135M-Instruct, which is 538 MB, in 120 MB. It shows the plan, the answer token by
token, and what this process really used; then the same model, held in memory, must write the same tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TQDM_DISABLE", "1")  # the answer is what is to be seen
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while they wait take the readers' cores
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines promise AMX and fail on it

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import overspill

MODEL = Path(__file__).parent.parent / ".demo" / "SmolLM2-135M-Instruct"  # where `make demo` puts it
PROMPT = "What is a computer's memory for? Answer in one sentence."
HOST_BUDGET = "200MB"  # where a GPU computes: what fits neither here nor there stays on disk
DEVICE = torch.device(0 if torch.accelerator.is_available() else "cpu")
MB = 1e6


def main() -> int:
    """Show the model within its budget, and compare it with the resident one."""
    arguments = parse()
    if arguments.resident:
        print(json.dumps(answer_resident(arguments)))
        return 0
    try:
        tokens = show(arguments)
    except overspill.errors.OverspillError as error:
        sys.exit(f"{error}.")
    # In a process of its own, so that the memory of the resident model is none of ours.
    again = [sys.executable, __file__, *sys.argv[1:], "--resident"]
    resident = json.loads(subprocess.run(again, check=True, stdout=subprocess.PIPE).stdout)
    same = tokens == resident
    verdict = "wrote the same tokens" if same else f"WROTE OTHERS: {resident}"
    print(f"4. The same model held wholly in memory, in another process, {verdict}.")
    return 0 if same else 1


def parse() -> argparse.Namespace:
    """What to run, and within how much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder with a causal language model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--budget", default="120MB", help="memory for weights, where it computes")
    parser.add_argument("--tokens", type=int, default=64, help="the most to answer with")
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"{arguments.model} holds no model. `make demo` puts one there; --model names another folder")
    return arguments


def show(arguments: argparse.Namespace) -> list[int]:
    """Plan, load and ask the model. The tokens that it answered."""
    print(f"overspill {overspill.__version__} on {DEVICE.type}, torch {torch.__version__}\n")
    config = AutoConfig.from_pretrained(arguments.model)
    with overspill.empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    print(f"1. {arguments.model.name} has {nbytes / MB:,.1f} MB of weights, and gets {arguments.budget} for them.\n")

    here: dict[int | str, str] = {"cpu": arguments.budget}
    plan = overspill.plan(model, here if DEVICE.type == "cpu" else {0: arguments.budget, "cpu": HOST_BUDGET})
    print(textwrap.indent(str(plan), "   ") + "\n")

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    streamer = Stopwatch(tokenizer)
    print(f"2. {arguments.prompt}\n")
    with peak_memory() as peak:
        overspill.load(model, arguments.model, plan, progress=False)
        read = bytes_read()
        tokens = generate(model, tokenizer, arguments, streamer)
        read = bytes_read() - read
    print(f"\n3. {len(tokens)} tokens, {streamer.rate():.1f} a second. Read on the way: {read / MB:,.1f} MB.")
    print(f"   {peak()}, caches and all, for weights of {nbytes / MB:,.1f} MB.\n")
    return tokens


def answer_resident(arguments: argparse.Namespace) -> list[int]:
    """The tokens that the model answers as Transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval().to(DEVICE)
    return generate(model, AutoTokenizer.from_pretrained(arguments.model), arguments)


def generate(
    model: Any, tokenizer: Any, arguments: argparse.Namespace, streamer: "Stopwatch | None" = None
) -> list[int]:
    """The likeliest answer."""
    if tokenizer.chat_template is None:
        inputs = tokenizer(arguments.prompt, return_tensors="pt")
    else:
        asked = [{"role": "user", "content": arguments.prompt}]
        inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(
        **inputs.to(DEVICE), max_new_tokens=arguments.tokens, do_sample=False, num_beams=1, streamer=streamer
    )
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


class Stopwatch(transformers.TextStreamer):  # type: ignore[misc]  # Transformers is not followed
    """Prints the answer as it comes, and knows how fast it came."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt at first, then token by token."""
        if not self._times:
            print("   ", end="")
        self._times.append(time.perf_counter())
        super().put(value)

    def rate(self) -> float:
        """Tokens a second, the prompt's pass not counted."""
        if len(self._times) < 3:
            return 0.0
        return (len(self._times) - 2) / (self._times[-1] - self._times[1])


@contextmanager
def peak_memory() -> Iterator[Callable[[], str]]:
    """Watch the memory that weights take; the result says afterwards how much that was."""
    if DEVICE.type != "cpu":
        module = torch.get_device_module(DEVICE)
        torch.ones(8, 8, device=DEVICE) @ torch.ones(8, 8, device=DEVICE)  # its workspace is no weight
        held = module.memory_allocated()
        module.reset_peak_memory_stats()
        yield lambda: f"The GPU held {(module.max_memory_allocated() - held) / MB:,.0f} MB at most"
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
        yield lambda: f"This process grew by {(most - start) / MB:,.0f} MB at most"
    finally:
        done.set()
        watcher.join()


def own_memory() -> int:
    """Bytes of this process that no file backs: what it cannot give back under pressure."""
    fields = proc("status")
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def bytes_read() -> int:
    """Bytes that this process has read from files so far, be it from the disk or from the kernel's cache of it."""
    return int(proc("io")["rchar"]) - sum(_asked)


def proc(name: str) -> dict[str, str]:
    """What Linux says about this process."""
    text = Path("/proc/self", name).read_text()
    _asked.append(len(text))
    return dict(line.split(":", 1) for line in text.splitlines())


_asked: list[int] = []  # bytes that were read to know all this, which are no weights


if __name__ == "__main__":
    raise SystemExit(main())
