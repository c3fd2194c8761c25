"""How Transformers' models are stored, which is not always how they are built. The only file that knows its internals.

Transformers 5.17 to 5.22 were tried. It fuses experts, splits projections and renames when it loads a checkpoint, and
undoes that when it saves one. Its own conversions are run here, on tensors that remember where elements come from.
"""

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from overspill.checkpoint.conversion import ConvertedTensor, Stored
from overspill.checkpoint.index import CheckpointIndex
from overspill.checkpoint.rearranging import Rearrangement
from overspill.checkpoint.traced import NotARearrangementError, Traced, as_they_are
from overspill.errors import ConversionError, PlanError
from overspill.tensors import TensorSpec, tensor_groups

_CONVERSIONS = "_weight_conversions"
"""The attribute in which Transformers keeps what it did when it loaded, to undo it when it saves."""

_LOAD_ELSEWHERE = "Load the model with Transformers, and save it with save_original_format=False"
_SAVE_AS_IT_IS = "Save it with original_format=False"


def is_transformers_model(model: nn.Module) -> bool:
    """Whether it is one of Transformers' models, without importing that."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def keep_islands(model: nn.Module, dtype: torch.dtype) -> None:
    """Give what a model keeps in float32 that dtype: a skeleton is built in one dtype throughout."""
    with _internals():
        from transformers.core_model_loading import build_glob_alternation

        plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)  # type: ignore[operator]  # a Transformers model
        if not plan:
            return
        anywhere, patterns, _ = build_glob_alternation(list(plan))
    for group in tensor_groups(model).values():
        found = next((match for match in map(anywhere.search, group.names) if match), None)
        if found is not None and group.tensor.is_floating_point():
            group.tensor.data = group.tensor.data.to(plan[patterns[found.lastgroup]])


def cache_bytes(model: nn.Module, context: int, batch: int, dtype: torch.dtype | None) -> int:
    """What `batch` texts of `context` tokens leave in a model's cache: keys and values of each layer."""
    if context < 1 or batch < 1:
        raise PlanError(f"context={context} and batch={batch} must be at least 1")
    of_transformers: Any = model
    if not is_transformers_model(model) or not remembers_tokens(of_transformers.config):
        raise PlanError(
            f"what {type(model).__name__} remembers of {context} tokens is not known here. Pass headroom instead"
        )
    config = of_transformers.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    tokens = sum(_remembered(kind, config, context) for kind in kinds)
    kept_in: torch.dtype = dtype or of_transformers.dtype
    return tokens * batch * _width(config) * kept_in.itemsize


def remembers_tokens(config: Any) -> bool:
    """Whether a model keeps keys and values of each token. A recurrent one keeps a state of fixed size instead."""
    text = config.get_text_config(decoder=True)
    return all(isinstance(getattr(text, name, None), int) for name in ("num_attention_heads", "num_hidden_layers"))


def _remembered(kind: str, config: Any, context: int) -> int:
    """The tokens that a layer keeps keys and values of."""
    if "linear" in kind or "mamba" in kind or "conv" in kind:
        return 0  # a state of fixed size
    limit = None
    if kind == "sliding_attention":
        limit = getattr(config, "sliding_window", None)
    elif kind == "chunked_attention":
        limit = getattr(config, "attention_chunk_size", None)
    return context if limit is None else min(context, limit)


def _width(config: Any) -> int:
    """The elements of one token's keys and values in one layer, or more: some versions keep less of compressed ones."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) is not None:
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * key_heads * head)


@dataclass(frozen=True)
class Conversion:
    """A checkpoint's tensors by the model's names, each as the model has it."""

    tensors: Mapping[str, Stored]
    used: tuple[Any, ...] | None = None

    def remember(self, model: nn.Module) -> None:
        """Note on the model what was done, where Transformers' own save and ours look for it."""
        if self.used is not None:
            setattr(model, _CONVERSIONS, list(self.used))


def converted(model: nn.Module, index: CheckpointIndex) -> Conversion:
    """The tensors of `index` as `model` has them. Reads nothing."""
    if not is_transformers_model(model):
        return Conversion(index)
    with _internals():
        from transformers.conversion_mapping import get_model_conversion_mapping

        transforms = get_model_conversion_mapping(model)
        tensors: dict[str, Stored] = {}
        for name, stored in _converted(model, index, transforms):
            tensors.setdefault(name, stored)  # of two keys for one tensor Transformers takes the first, too
    ignored = _ignored(model)
    known = model.state_dict().keys()
    wanted = {name: stored for name, stored in tensors.items() if name in known or not ignored.search(name)}
    return Conversion(wanted, tuple(transform for transform in transforms if transform.was_used()))


def _converted(model: nn.Module, index: CheckpointIndex, transforms: list[Any]) -> Iterator[tuple[str, Stored]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, Any] = {}
    for key in sorted(index, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # it is stored as the model has it
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            yield key, index[key]
        elif pattern is None:
            yield name, index[key]
        else:
            if name not in groups:
                groups[name] = copy.deepcopy(by_pattern[pattern])
            groups[name].add_tensor(name, key, pattern, Traced.source(key, index[key].spec))
    for name, group in groups.items():
        try:
            with _following(f"{name} is made by {group}, which", _LOAD_ELSEWHERE, "The checkpoint is another model's"):
                made = {key: _made_of(value) for key, value in _convert(group, name, model).items()}
        except ConversionError:
            _refuse_incomplete(model, index, transforms, [name])
            raise
        if any(key in state and tuple(state[key].shape) != part.spec.shape for key, part in made.items()):
            _refuse_incomplete(model, index, transforms, list(made))
        for key, part in made.items():
            yield key, ConvertedTensor(key, part, index)


def _convert(group: Any, name: str, model: nn.Module) -> dict[str, Any]:
    made: dict[str, Any] = group.convert(name, model=model, config=model.config)
    return made


def _made_of(traced: Any) -> Rearrangement:
    rearrangement: Rearrangement = (traced[0] if isinstance(traced, list) else traced).rearrangement()
    return rearrangement


def _refuse_incomplete(model: nn.Module, index: CheckpointIndex, transforms: list[Any], names: list[str]) -> None:
    """Name the stored tensors that `names` lack, if that is what is wrong with them."""
    specs = {name: TensorSpec.of(tensor) for name, tensor in model.state_dict().items()}
    before = getattr(model, _CONVERSIONS, None)
    setattr(model, _CONVERSIONS, [transform for transform in transforms if transform.was_used()])
    try:
        made_of = reverted(model, specs)
    except ConversionError:  # it has no way back, so who knows what is stored
        return
    finally:
        setattr(model, _CONVERSIONS, before) if before is not None else delattr(model, _CONVERSIONS)
    needed = [key for key, part in made_of.items() if not {*names}.isdisjoint(part.sources)]
    absent = [key for key in needed if key not in index]
    if absent and len(absent) < len(needed):  # none of them: they have other names, and that is not the reason
        raise ConversionError(
            f"{', '.join(names)} cannot be made: {index.folder} has no {', '.join(absent[:8])}"
            f"{f' and {len(absent) - 8} more' if len(absent) > 8 else ''}. Download or save the checkpoint again"
        )


def _ignored(model: nn.Module) -> re.Pattern[str]:
    """Keys that old checkpoints have, and that Transformers drops without a word."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")


def reverted(model: nn.Module, specs: Mapping[str, TensorSpec]) -> dict[str, Rearrangement]:
    """What the checkpoint of `model` holds, by the checkpoint's names: each tensor, made of the model's."""
    if not is_transformers_model(model) or getattr(model, "_hf_peft_config_loaded", False):
        return as_they_are(specs)
    state = {name: Traced.source(name, spec) for name, spec in specs.items()}
    with _internals():
        from transformers.core_model_loading import revert_weight_conversion

        with _following("the model is stored in another form, which", _SAVE_AS_IT_IS, _SAVE_AS_IT_IS):
            state = revert_weight_conversion(model, state)
    return {name: _made_of(traced) for name, traced in state.items()}


@contextmanager
def _following(what: str, if_it_computes: str, if_it_fails: str) -> Iterator[None]:
    """Within, conversions are followed. One that cannot be becomes an error that says which, and what to do."""
    try:
        with torch.no_grad():
            yield
    except NotARearrangementError as error:
        raise ConversionError(f"{what} takes more than to move values: {error}. {if_it_computes}") from error
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise ConversionError(f"{what} fails: {error}. {if_it_fails}") from error


@contextmanager
def _internals() -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise ConversionError(
            f"Transformers {version('transformers')} converts checkpoints in a way that is not known here ({error}). "
            "Install a version from 5.17 to 5.22"
        ) from error
