"""Text from a model of Transformers, word by word as it comes, with what it took."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from overspill.errors import CheckpointError, CheckpointNotFoundError, PlanError
from overspill.integrations.configs import model_class_of, read_config


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. None for the temperature: the likeliest."""

    max_new_tokens: int = 128
    temperature: float | None = None
    seed: int | None = None

    def options(self) -> dict[str, Any]:
        """As `generate` wants it. The model's own generation config has a say in sampling alone (top_k, top_p)."""
        if self.temperature is None:
            chosen: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            chosen = {"do_sample": True, "temperature": self.temperature}
        return {"max_new_tokens": self.max_new_tokens, **chosen}


@dataclass
class Generated:
    """The text, and when its tokens came, in seconds from the start."""

    text: str = ""
    prompt_tokens: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> float:
        """What the prompt took, and the first token with it."""
        return self.times[0] if self.times else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens behind the first. None: there was one at most."""
        if len(self.times) < 2:
            return None
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


def generating_class(path: str | os.PathLike[str]) -> Any:
    """The class to load the model at `path` with."""
    config = read_config(path)
    model_class = model_class_of(config, path)
    if not getattr(model_class, "can_generate", lambda: True)():
        raise PlanError(f"{path} is a {model_class.__name__}, which writes no text. Give a language model")
    return model_class


def tokenizer_of(path: str | os.PathLike[str]) -> Any:
    """The tokenizer beside the weights."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever its many formats trip over
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise CheckpointNotFoundError(
            f"{path} has no tokenizer that can be read ({reason}). Put the tokenizer's files beside the weights"
        ) from error


def encode(tokenizer: Any, prompt: str, *, chat: bool, path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The prompt as the model takes it, in a conversation's form if it is one."""
    if chat and tokenizer.chat_template is None:
        raise CheckpointError(
            f"the tokenizer of {Path(path)} has no chat template, so it does not know conversations. Leave out --chat"
        )
    if chat:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].numel() == 0:
        raise PlanError("the prompt has no tokens. Give a longer one")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def generate(
    model: Any, tokenizer: Any, inputs: dict[str, torch.Tensor], sampling: Sampling, on_text: Callable[[str], None]
) -> Generated:
    """Have the model go on from `inputs`. `on_text` gets each piece of text when it is certain."""
    from transformers import TextStreamer

    generated = Generated(prompt_tokens=inputs["input_ids"].shape[1])
    start = time.perf_counter()

    class Streamer(TextStreamer):  # type: ignore[misc]  # its base is not followed
        def put(self, value: torch.Tensor) -> None:
            if not self.next_tokens_are_prompt:
                generated.times.append(time.perf_counter() - start)
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            generated.text += text
            on_text(text)

    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad():
        given = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        model.generate(**given, **sampling.options(), streamer=streamer, pad_token_id=pad)
    return generated
