"""The verbs."""

import os
from collections.abc import Collection, Mapping

import torch
from torch import nn

from overspill.checkpoint import open_checkpoint
from overspill.devices import compute_device
from overspill.errors import PlanError, StateError
from overspill.loading import Loader
from overspill.managed import managed
from overspill.matching import match
from overspill.plan import Plan
from overspill.planner import make_plan
from overspill.tensors import tensor_groups


def plan(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    *,
    no_split_modules: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    window: int | str | None = None,
    headroom: int | str | None = None,
    device: torch.device | str | int | None = None,
) -> Plan:
    """Decide where each part of `model` lives: on the compute device first, then in host memory, then on disk.

    Reads sizes only, so a skeleton from `empty_weights` will do, and no device is touched when `max_memory` and
    `device` are given. `print(plan)` shows what goes where and what a pass will cost.

    Args:
        max_memory: Bytes for each device as in Accelerate: `{0: "10GiB", "cpu": "30GiB"}`. A device that is not named
            gets no weights, disk is unlimited, so `{}` puts everything on disk. None: what is free, less `headroom`.
        no_split_modules: Class names of the blocks that move as one. None: found by themselves.
        dtype: Plan for floating-point weights cast to this; pass the same to `load`.
        window: Device memory to stream through. None: room for a few blocks, within the budget if there is one.
        headroom: Bytes to leave free on the compute device for activations and caches.
        device: Where to compute. None: the first accelerator, else the CPU.
    """
    return make_plan(
        model,
        max_memory,
        no_split_modules=no_split_modules,
        dtype=dtype,
        window=window,
        headroom=headroom,
        device=device,
    )


def load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    max_memory: Mapping[int | str, int | str] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    offload_folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Fill `model` from `checkpoint`, each tensor straight in its tier, and make it run from there. Returns `model`.

    What goes to disk is not copied: it is read from the checkpoint itself whenever it is needed. If anything fails, the
    model is left as it was.

    Args:
        checkpoint: A safetensors file, a folder, an index.json, or a `.bin`/`.pt` file (no code in it is run).
        plan: From `overspill.plan`. None: made here, within `max_memory`.
        dtype: Cast floating-point weights to this. None: the dtype that the model has.
        strict: Every key of the checkpoint must be in the model and the other way round.
        offload_folder: Where tensors on disk are converted to when their dtype changes; nothing else is written there.
        progress: Show a bar with bytes and rate, on a terminal.
    """
    if managed(model) is not None:
        raise StateError("this model is already managed by overspill. Build a new one to load another checkpoint")
    if plan is not None and max_memory is not None:
        raise PlanError("max_memory has no effect beside a plan, which has its budgets. Pass one of the two")
    if plan is not None and dtype is not None and plan.dtype != dtype:
        raise PlanError(f"the plan was made for dtype={plan.dtype}, not {dtype}. Pass the same dtype to plan and load")
    dtype = dtype if plan is None else plan.dtype
    groups = tensor_groups(model)
    matches = match(groups, open_checkpoint(checkpoint), dtype=dtype, strict=strict)
    if plan is None:
        plan = make_plan(model, max_memory, dtype=dtype)
    plan.check(groups)
    for device in plan.devices:
        compute_device(device)  # a plan can be made anywhere, but must be carried out where its devices are
    Loader(model, plan, groups, matches, folder=offload_folder, progress=progress).run()
    return model
