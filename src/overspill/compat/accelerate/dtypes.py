"""Dtypes as Accelerate's callers write them, and models that are to have others than they have."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from overspill.errors import PlanError
from overspill.tensors import TensorGroup, tensor_groups


def as_dtype(dtype: object) -> torch.dtype | None:
    """`dtype`, or the one that a string such as "float16" or "torch.float16" names."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is not None and not isinstance(found, torch.dtype):
        found = None
    if found is None and dtype is not None:
        raise PlanError(f"dtype={dtype!r} is none of torch's. Write one such as torch.float16 or 'float16'")
    return found


def as_cast(dtype: object) -> torch.dtype | None:
    """`dtype` for a load, which casts weights and does not quantize them."""
    cast = as_dtype(dtype)
    if cast is not None and not cast.is_floating_point:
        raise PlanError(f"weights cannot be cast to {cast}. Give a floating-point dtype, or None to keep each one's")
    return cast


def stand_in(model: nn.Module, dtype: torch.dtype | None, special: Mapping[str, torch.dtype | None]) -> nn.Module:
    """A model without values to plan `model` with: its modules, its ties, and the dtypes that it is to have.

    Weights that are to be quantized have integers' sizes, which no cast of floating-point weights gives.
    """
    twins: dict[int, torch.Tensor] = {}
    for group in tensor_groups(model).values():
        named = next((special[name] for name in group.names if name in special), None)
        wanted = named or (dtype if group.persistent and group.tensor.is_floating_point() else None)
        values = torch.empty(group.tensor.shape, dtype=wanted or group.tensor.dtype, device="meta")
        is_parameter = group.kind == "parameter"
        twins[id(group.tensor)] = nn.Parameter(values, requires_grad=False) if is_parameter else values
    return _with_tensors(model, twins, {})


def _with_tensors(module: nn.Module, twins: Mapping[int, torch.Tensor], made: dict[int, nn.Module]) -> nn.Module:
    """A module that looks like `module` and shares all of it but its tensors. No code of its class runs."""
    if id(module) in made:
        return made[id(module)]
    copy = made[id(module)] = type(module).__new__(type(module))
    copy.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers"):
        entries = module.__dict__[table].items()
        copy.__dict__[table] = {name: None if entry is None else twins[id(entry)] for name, entry in entries}
    children = module.__dict__["_modules"].items()
    copy.__dict__["_modules"] = {
        name: None if child is None else _with_tensors(child, twins, made) for name, child in children
    }
    return copy


@contextmanager
def loading_in(model: nn.Module, dtype: torch.dtype | None, in_fp32: Collection[str]) -> Iterator[None]:
    """Within, `model` is loaded in `dtype`, but for what `in_fp32` names. If that fails, its tensors are as they were.

    A load gives each tensor the dtype that the model has for it, so that is what is changed.
    """
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for group in tensor_groups(model).values():
            wanted = torch.float32 if _is_named(group, in_fp32) else dtype
            if group.persistent and group.tensor.is_floating_point() and wanted not in (None, group.tensor.dtype):
                before.append((group.tensor, group.tensor.data))
                group.tensor.data = group.tensor.data.to(wanted)
        yield
    except BaseException:
        for tensor, values in before:
            tensor.data = values
        raise


def _is_named(group: TensorGroup, keys: Collection[str]) -> bool:
    """By a part of its name that ends with a module's or the tensor's, which is how Accelerate looks for them."""
    return any(key == name or f"{key}." in name for key in keys for name in group.names)
