"""`overspill run`: text from a model within a budget, token by token, and what it took."""

import logging
import sys
from typing import Annotated, Any

import typer

import overspill
from overspill.cli.errors import require
from overspill.cli.memory import PeakMemory
from overspill.cli.options import Debug, Device, Json, MaxMemory, parse_dtype
from overspill.cli.output import Output
from overspill.config import format_size
from overspill.integrations.configs import read_config
from overspill.integrations.generating import Generated, Sampling, encode, generate, generating_class, tokenizer_of
from overspill.integrations.transformers import remembers_tokens
from overspill.managed import managed
from overspill.plan import Plan
from overspill.planner import Budget, read_budget


def run(
    context: typer.Context,
    path: Annotated[str, typer.Argument(help="A folder with config.json, weights and tokenizer.")],
    prompt: Annotated[str, typer.Option(help="What the model goes on from.", show_default=False)],
    max_memory: MaxMemory = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 128,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream", help="Print words as they come. Left out: on a terminal.", show_default=False
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt as a question, by the chat template.")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sample, at this temperature. Left out, or 0: the likeliest.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling: the same text again.", show_default=False)] = None,
    dtype: Annotated[
        Any | None,
        typer.Option(parser=parse_dtype, help="Of floating-point weights. Left out: the config's.", show_default=False),
    ] = None,
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Have a language model write, within a memory budget. Tokens a second and peak memory come at the end, on stderr.

    What the model remembers of the prompt and of --max-new-tokens is counted in the budget, beside the weights.
    With --json the text comes with them at the end, and --stream prints it on stderr meanwhile.
    """
    output: Output = context.obj
    if seed is not None and not temperature:
        raise typer.BadParameter("--seed has no effect without --temperature: the likeliest token is always the same")
    require("transformers", "running a model")
    _quiet_transformers()
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature or None, seed=seed)
    model_class, tokenizer = generating_class(path), tokenizer_of(path)
    inputs = encode(tokenizer, prompt, chat=chat, path=path)
    words = _Words(wanted=sys.stdout.isatty() if stream is None else stream, err=output.as_json)
    budget = read_budget(max_memory, device=device)
    length = inputs["input_ids"].shape[1] + max_new_tokens if _takes_of(budget, path) else None
    with PeakMemory(budget.device) as peak:
        model = overspill.from_pretrained(
            model_class, path, max_memory=max_memory, dtype=dtype, context=length, device=device
        )
        generated = generate(model, tokenizer, inputs, sampling, words.show)
    words.end()
    manager = managed(model)
    assert manager is not None
    document = _document(generated, manager.plan, peak)
    if output.as_json:
        output.result(document)
    elif not words.wanted:
        output.result(document, generated.text)
    if not output.as_json:
        output.note(_summary(generated, manager.plan, peak))


def _takes_of(budget: Budget, path: str) -> bool:
    """Whether what the model remembers of a text takes memory of a device that has a budget."""
    computing = [place for place in budget.capacity if place == budget.device or place.type != "cpu"]
    return any(budget.capacity[place] for place in computing) and remembers_tokens(read_config(path))


class _Words:
    """Text as it comes."""

    def __init__(self, *, wanted: bool, err: bool) -> None:
        self.wanted, self._err = wanted, err

    def show(self, text: str) -> None:
        if self.wanted:
            typer.echo(text, nl=False, err=self._err)

    def end(self) -> None:
        if self.wanted:
            typer.echo(err=self._err)


def _quiet_transformers() -> None:
    """Its warnings are about Python code that the user of a command never wrote."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _summary(generated: Generated, plan: Plan, peak: PeakMemory) -> str:
    lines = [f"{generated.prompt_tokens} tokens in, {len(generated.times)} out: the first after "]
    lines[0] += f"{generated.first_token_seconds:.3g} s"
    if generated.tokens_per_second is not None:
        lines[0] += f", then {generated.tokens_per_second:.3g} tokens/s"
    device = [] if peak.on_device is None else [f"{format_size(peak.on_device)} on {plan.device}"]
    memory = ", ".join([*device, f"{format_size(peak.host)} of host memory beyond Python's own"])
    lines.append(f"peak memory: {memory}")
    resting = [
        f"{format_size(nbytes)} {where}"
        for nbytes, where in (
            (plan.resident_bytes + plan.stays_nbytes, "resident"),
            (plan.cpu_bytes, "in CPU memory"),
            (plan.disk_bytes, "on disk"),
        )
        if nbytes
    ]
    window = f", through a window of {format_size(plan.window)}" if plan.window else ""
    lines.append(f"weights: {', '.join(resting)}{window}")
    return "\n".join(lines)


def _document(generated: Generated, plan: Plan, peak: PeakMemory) -> dict[str, Any]:
    return {
        "text": generated.text,
        "prompt_tokens": generated.prompt_tokens,
        "new_tokens": len(generated.times),
        "first_token_seconds": generated.first_token_seconds,
        "tokens_per_second": generated.tokens_per_second,
        "peak_device_bytes": peak.on_device,
        "peak_host_bytes": peak.host,
        "device": str(plan.device),
        "resident_bytes": plan.resident_bytes + plan.stays_nbytes,
        "cpu_bytes": plan.cpu_bytes,
        "disk_bytes": plan.disk_bytes,
        "window_bytes": plan.window,
        "headroom": {str(place): nbytes for place, nbytes in plan.headroom.items()},
    }
