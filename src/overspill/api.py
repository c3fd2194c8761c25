"""The verbs. What few programs use, such as training and reports, is imported where it is used."""

import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

import overspill.integrations.scaling  # noqa: F401  # it sees to torch's scalers once a model is offloaded
from overspill.checkpoint import CheckpointIndex, open_checkpoint
from overspill.devices import compute_device
from overspill.errors import PlanError, StateError
from overspill.integrations.pretrained import skeleton_from_pretrained
from overspill.integrations.transformers import cache_bytes, converted
from overspill.loading import Loader
from overspill.managed import managed, managers_of
from overspill.matching import match
from overspill.offloading import Offloaded, changing, offload_by_plan, offload_parts, restore_parts
from overspill.plan import Plan
from overspill.planner import make_plan
from overspill.saving import StateDict, outputs_of, save_model
from overspill.tensors import tensor_groups

if TYPE_CHECKING:
    from overspill.reporting import Report


def plan(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    *,
    no_split_modules: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    window: int | str | None = None,
    headroom: int | str | None = None,
    context: int | None = None,
    batch: int | None = None,
    device: torch.device | str | int | None = None,
) -> Plan:
    """Decide where each part of `model` lives: on the compute device first, then in host memory, then on disk.

    Reads sizes only, so a skeleton from `empty_weights` will do, and no device is touched when `max_memory` and
    `device` are given. `print(plan)` shows what goes where and what a pass will cost.

    Args:
        model: Any module: with weights, or a skeleton without.
        max_memory: Bytes for each device as in Accelerate: `{0: "10GiB", "cpu": "30GiB"}`. A device that is not named
            gets no weights, disk is unlimited, so `{}` puts everything on disk. None: what is free, less `headroom`.
        no_split_modules: Class names of the blocks that move as one. None: found by themselves.
        dtype: Plan for floating-point weights cast to this; pass the same to `load`.
        window: Device memory to stream through. None: room for a few blocks, within the budget if there is one.
        headroom: Bytes to leave free on the compute device for activations and caches.
        context: Tokens of a text that is generated, prompt included: room for what a Transformers model remembers of
            them (keys and values) is left beside the headroom.
        batch: Texts that are generated at once. 1 if not given.
        device: Where to compute. None: the first accelerator, else the CPU.

    Raises:
        BudgetError: A size or device that cannot be read, or a budget too small for one unit. It says what would do.
        PlanError: An option that has no effect, or a class in `no_split_modules` that the model does not have.

    Example:
        with overspill.empty_weights():
            model = build()
        plan = overspill.plan(model, {0: "10GiB", "cpu": "30GiB"}, device="cuda:0")
        print(plan)
    """
    return make_plan(
        model,
        max_memory,
        no_split_modules=no_split_modules,
        dtype=dtype,
        window=window,
        headroom=headroom,
        cache=_cache(model, context, batch, dtype),
        device=device,
    )


def _cache(model: nn.Module, context: int | None, batch: int | None, dtype: torch.dtype | None) -> int:
    if context is None:
        if batch is not None:
            raise PlanError(f"batch={batch} has no effect without context, the tokens of each text. Pass both")
        return 0
    return cache_bytes(model, context, 1 if batch is None else batch, dtype)


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
        model: Any module, mostly a skeleton from `empty_weights`. What it has in memory is replaced.
        checkpoint: A safetensors file, a folder, an index.json, or a `.bin`/`.pt` file (no code in it is run).
        plan: From `overspill.plan`. None: made here, within `max_memory`.
        max_memory: As in `overspill.plan`, for when no plan is given.
        dtype: Cast floating-point weights to this. None: the dtype that the model has.
        strict: Every key of the checkpoint must be in the model and the other way round.
        offload_folder: Where tensors on disk are converted to when their dtype changes, or when they are transposed;
            nothing else is written there. Experts that the model has fused are read where they lie. None: a temporary
            folder, which ends with the model.
        progress: Show a bar with bytes and rate, on a terminal.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, unsafe or another model's. Its subclasses say which.
        PlanError: The plan is not this model's, or an option has no effect beside it.
        BudgetError: `max_memory` cannot be read or met, or the plan's devices are not here.
        OffloadFolderError: What must be converted cannot be written.
        StateError: The model is loaded or offloaded already.

    Example:
        with overspill.empty_weights():
            model = build()
        overspill.load(model, "checkpoint", max_memory={"cpu": "4MB"})
        output = model(torch.randn(1, 512))
    """
    return _load(
        model,
        open_checkpoint(checkpoint),
        plan,
        max_memory=max_memory,
        dtype=dtype,
        strict=strict,
        offload_folder=offload_folder,
        progress=progress,
    )


def _load(
    model: nn.Module,
    index: CheckpointIndex,
    plan: Plan | None,
    *,
    max_memory: Mapping[int | str, int | str] | None,
    dtype: torch.dtype | None,
    strict: bool,
    offload_folder: str | os.PathLike[str] | None,
    progress: bool,
) -> nn.Module:
    if managed(model) is not None:
        raise StateError("this model is already managed by overspill. Build a new one to load another checkpoint")
    if plan is not None and max_memory is not None:
        raise PlanError("max_memory has no effect beside a plan, which has its budgets. Pass one of the two")
    if plan is not None and dtype is not None and plan.dtype != dtype:
        raise PlanError(f"the plan was made for dtype={plan.dtype}, not {dtype}. Pass the same dtype to plan and load")
    dtype = dtype if plan is None else plan.dtype
    groups = tensor_groups(model)
    conversion = converted(model, index)
    matches = match(groups, conversion.tensors, index.folder, dtype=dtype, strict=strict)
    if plan is None:
        plan = make_plan(model, max_memory, dtype=dtype)
    plan.check(groups)
    for device in plan.devices:
        compute_device(device)  # a plan can be made anywhere, but must be carried out where its devices are
    Loader(model, plan, groups, matches, folder=offload_folder, progress=progress).run()
    conversion.remember(model)
    return model


def from_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    *,
    max_memory: Mapping[int | str, int | str] | None = None,
    dtype: torch.dtype | str | None = None,
    window: int | str | None = None,
    headroom: int | str | None = None,
    context: int | None = None,
    batch: int | None = None,
    device: torch.device | str | int | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **options: Any,
) -> Any:
    """A model of Transformers from its checkpoint: skeleton, plan and load in one. Returns the model, to evaluate.

    Its config, conversions, generation config, ties and the tensors that it keeps in float32 are Transformers' own.

    Args:
        model_class: `AutoModelForCausalLM` or another of Transformers' classes.
        path: A folder with config.json and the weights, or the name of a model on the hub.
        max_memory: As in `overspill.plan`: `{0: "10GiB", "cpu": "30GiB"}`. None: what is free.
        dtype: Of floating-point weights. None: what the config says, else what is stored.
        window: As in `overspill.plan`.
        headroom: As in `overspill.plan`.
        context: As in `overspill.plan`.
        batch: As in `overspill.plan`.
        device: Where to compute. None: the first accelerator, else the CPU.
        offload_folder: As in `overspill.load`.
        progress: Show a bar with bytes and rate, on a terminal.
        options: Passed on: `attn_implementation`, `revision`, `trust_remote_code`, what the config is to have instead …

    Raises:
        CheckpointError: As in `overspill.load`; CheckpointNotFoundError also where the hub has no such model.
        PlanError: An option of Transformers that has no use here, with the one that has; or a quantized checkpoint.
        BudgetError: As in `overspill.plan`.

    Example:
        model = overspill.from_pretrained(AutoModelForCausalLM, "llama", max_memory={"cpu": "8MB"})
        tokens = model.generate(torch.tensor([[1, 2, 3]], device=model.device), max_new_tokens=5)
    """
    model, index = skeleton_from_pretrained(model_class, path, dtype, options)
    cache = _cache(model, context, batch, None)
    plan = make_plan(model, max_memory, window=window, headroom=headroom, cache=cache, device=device)
    return _load(
        model,
        index,
        plan,
        max_memory=None,
        dtype=None,
        strict=True,
        offload_folder=offload_folder,
        progress=progress,
    )


def offload(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    to: Literal["cpu", "disk"] | None = None,
    modules: str | Collection[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    device: torch.device | str | int | None = None,
    min_bytes: int | None = None,
) -> Offloaded:
    """Move a model that is in memory, or parts of it, to host memory or disk, and stream it from there when it runs.

    Parameters stay the objects that they are, so an optimizer goes on working, and `restore` undoes it. Everything is
    done or nothing: after an error the model is as it was. Aliases that were made before (`parameter.data`, views,
    arrays) keep the old memory.

    Args:
        model: A module, or a model with `modules` in it.
        plan: From `overspill.plan`: all of the model goes where it says.
        to: Without a plan, where all of it goes. What is on "cpu" can move to "disk" and back.
        modules: Dotted paths in `model`; a container means all in it. None: all of it.
        folder: Where files go, one folder a module. None: a temporary folder that ends with the model.
        device: Where it computes. None: where it is now.
        min_bytes: Modules whose own tensors are less than this in all stay. 4096 if not given.

    Returns:
        What was moved, what was written, and what stayed.

    Raises:
        PlanError: A path that the model does not have, a plan for another model, or options that exclude each other.
        StateError: Something is offloaded there already, or nothing would move.
        OffloadFolderError: The folder is another model's or another user's, or cannot be written.

    Example:
        model = build()
        moved = overspill.offload(model, to="disk", modules=["0", "1"])
        print(moved)
    """
    if (plan is None) == (to is None):
        raise PlanError("offload needs to know where to: pass a plan, or to='cpu' or to='disk', and not both")
    if plan is not None:
        given = {"modules": modules, "device": device, "min_bytes": min_bytes}
        if useless := [name for name, value in given.items() if value is not None]:
            raise PlanError(f"{', '.join(useless)} has no effect beside a plan, which says it all. Leave it out")
        return offload_by_plan(model, plan, folder)
    assert to is not None
    least = 4096 if min_bytes is None else min_bytes
    return offload_parts(model, to=to, modules=modules, folder=folder, device=device, min_bytes=least)


def restore(
    model: nn.Module,
    *,
    modules: str | Collection[str] | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    delete: bool = False,
) -> nn.Module:
    """Make a model, or parts of it, ordinary again: in memory, with all edits, and nothing of overspill left on it.

    Args:
        model: A module that is offloaded, or a model with such modules in it; one that Accelerate has dispatched is
            adopted first. It is returned.
        modules: Dotted paths in `model`. None: all that is offloaded.
        device: Where to. None: where each tensor was before; for a model that was loaded, where it computes.
        dtype: Cast floating-point tensors to this. None: each keeps its own.
        delete: Remove the files that the offload wrote, and their folder if nothing else is in it.

    Raises:
        StateError: Nothing of it is offloaded.
        PlanError: A path that the model does not have.
        CheckpointError: A file that a weight is in has changed or is gone. The model stays as it is.

    Example:
        overspill.restore(model)
        assert type(model[0].weight) is nn.Parameter
    """
    restore_parts(
        model,
        modules=modules,
        device=device,
        dtype=dtype,
        delete=delete,
        adopt=_adopt_first if _looks_dispatched(model) else None,
    )
    return model


def _looks_dispatched(model: nn.Module) -> bool:
    if not any("_hf_hook" in vars(module) for module in model.modules()):
        return False
    from overspill.integrations.accelerate import is_dispatched  # only where there are hooks to look at

    return is_dispatched(model)


def _adopt_first(model: nn.Module) -> None:
    """What is offloaded in a dispatched model comes back, and then all of it is ours."""
    if managers_of(model):
        restore_parts(model, modules=None, device=None, dtype=None, delete=False)
    adopt(model)


def adopt(model: nn.Module, plan: Plan | None = None) -> nn.Module:
    """Take over a model that Accelerate has dispatched, and make it fast in place. Returns `model`.

    Accelerate's hooks are removed. Weights in host memory are pinned where they lie, weights on disk are read where
    they lie; nothing is copied, and each part stays on the device where it was. If anything fails, the model is as it
    was, with its hooks.

    Args:
        model: From `from_pretrained(device_map=...)`, `dispatch_model`, `cpu_offload`, `disk_offload`, and so on.
        plan: Put its parts where this says. None: leave each where Accelerate put it.

    Raises:
        StateError: It is not dispatched, or in a way that cannot be taken over: the message names the hook.
        CheckpointError: Files of Accelerate's that are gone, changed or not as its index says.
        PlanError: The plan casts, or is another model's.

    Example:
        model = AutoModelForCausalLM.from_pretrained(
            "llama", device_map="auto", max_memory={"cpu": "8MB"}, offload_folder="offload"
        )
        overspill.adopt(model)
    """
    from overspill.adopting import adopt_model  # it looks for Accelerate, which few programs have loaded

    adopt_model(model, plan)
    return model


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    original_format: bool = True,
    metadata: Mapping[str, str] | None = None,
    progress: bool = True,
) -> None:
    """Write the model's checkpoint, from wherever its tensors lie, in a few megabytes of memory.

    safetensors files that Transformers, vLLM and `safe_open` read: one if it fits, else shards with an index, holding
    parameters and persistent buffers with all edits, each in its dtype, ties once. The checkpoint that is in `folder`,
    which may be the one that the model was loaded from, stays whole until the new one stands. Forwards wait meanwhile.

    Args:
        model: Any module, offloaded or not.
        folder: New, empty, or with a checkpoint to replace.
        max_shard_size: Bytes of tensors in one file; a larger tensor gets a file of its own.
        original_format: Undo what Transformers did to the tensors when they were loaded: experts that it fused are
            stored one by one again. False: names and shapes as the model has them.
        metadata: Strings to keep in the files' headers.
        progress: Show a bar with bytes and rate, on a terminal.

    Raises:
        SaveError: The folder holds something else or is full, or is being saved to. The old checkpoint is whole.
        ConversionError: The form in which it was loaded cannot be written again: pass `original_format=False`.
        CheckpointError: A file that a weight is in has changed or is gone.

    Example:
        overspill.save(model, "out", max_shard_size="4MB")
    """
    save_model(
        model,
        folder,
        max_shard_size=max_shard_size,
        original_format=original_format,
        metadata=metadata,
        progress=progress,
    )


def state_dict(model: nn.Module, *, original_format: bool = True) -> StateDict:
    """What `save` would write, by name, each tensor read when it is asked for. For those who write other formats.

    Args:
        model: Any module, offloaded or not.
        original_format: As in `overspill.save`.

    Raises:
        ConversionError: As in `overspill.save`.

    Example:
        for name, tensor in overspill.state_dict(model).items():
            print(name, tuple(tensor.shape))
    """
    with changing(model, "read a model"):  # not in the middle of a forward, where modules show other tensors
        return StateDict(outputs_of(model, original_format=original_format))


def offload_training(
    model: nn.Module,
    *,
    layers: int | Collection[str] | None = None,
    activations: bool | Literal["disk"] = True,
    weights: bool | Literal["disk"] = False,
    recompute: bool = False,
    double_buffering: bool = True,
    memory: int | str | None = None,
) -> nn.Module:
    """Let `model` train with less device memory, bit for bit as before. Then train as usual; `restore` ends it.

    Parameters stay the objects that they are, so optimizers, schedulers and clipping go on working, also those that
    were made before. Returns `model`.

    Args:
        model: Where it computes, and trained from there.
        layers: How many of its blocks, from the first, up to all but the last; or a list of their dotted paths. None:
            all but the last, or the best choice within `memory`.
        activations: What a block saves for its backward leaves for pinned host memory as it is produced, and is back
            when it is needed. "disk": for a file.
        weights: A block's weights live in pinned host memory and come for its forward and its backward; their gradients
            go there as they are produced. The optimizer runs on the CPU then. "disk": the weights live in a temporary
            file; of blocks that have frozen ones, only those.
        recompute: Blocks save their inputs only, and are computed once more in backward.
        double_buffering: Room for what is on its way while blocks compute: the weights of three blocks, the gradients
            of two, up to 256 MiB of activations each way. Off: two blocks', one block's, 128 MiB; the device waits
            for copies more often.
        memory: Device memory for a whole training step, "20GiB". The second step is measured; from the third on each
            block keeps, offloads or recomputes, whatever is fastest within this, and the choice is printed. With
            `weights`, all blocks' weights leave, also the last one's.

    Raises:
        PlanError: Layers that the model does not have, or options that have no effect together.
        BudgetError: Host memory does not hold the weights, or `memory` is less than a step takes at the least; the
            latter comes in the step that finds out.
        OffloadFolderError: The disk has no room for the weights.
        StateError: Something of the model is offloaded already.

    Example:
        model = build()
        overspill.offload_training(model, layers=["0", "1", "2"], weights=True)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
    """
    from overspill.training.offload import offload_for_training

    offload_for_training(
        model,
        layers=layers,
        activations=activations,
        weights=weights,
        recompute=recompute,
        double_buffering=double_buffering,
        memory=memory,
    )
    return model


def offload_activations(
    *, to: Literal["cpu", "disk"] = "cpu", min_bytes: int | str | None = None, double_buffering: bool = True
) -> AbstractContextManager[None]:
    """Within, tensors that autograd saves leave the device until backward needs them, whatever code runs.

    A context around the forward; backward comes after it. Parameters, their views and small tensors stay.

    Args:
        to: Pinned host memory, or a file.
        min_bytes: Tensors smaller than this stay. 1 MiB if not given.
        double_buffering: As in `offload_training`.

    Raises:
        PlanError: Another place than "cpu" and "disk".
        BudgetError: A size that cannot be read.

    Example:
        x = torch.randn(256, 256, requires_grad=True)
        with overspill.offload_activations(min_bytes=0):
            loss = (x @ x).relu().square().mean()
        loss.backward()
    """
    from overspill.training.offload import activations_offloaded

    return activations_offloaded(to=to, min_bytes=min_bytes, double_buffering=double_buffering)


def trace(model: nn.Module, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Within the context, record what is read, copied, waited for and computed, and write a timeline to `path`.

    The file is for https://ui.perfetto.dev or chrome://tracing. Costs a little time, and memory for each event.

    Args:
        model: A managed model, of which something is offloaded.
        path: The file to write, when the context ends.

    Raises:
        StateError: Nothing of it is offloaded, or it is being traced already.

    Example:
        model = overspill.from_pretrained(AutoModelForCausalLM, "llama", max_memory={"cpu": "8MB"})
        with overspill.trace(model, "trace.json"):
            model(torch.tensor([[1, 2, 3]]))
    """
    from overspill.tracing import trace_model

    return trace_model(model, path)


def report(model: nn.Module) -> "Report":
    """What is where, what was moved since the model is managed, and how well that was foreseen.

    Print it, or save it as a page with pictures; after a `trace`, with a timeline.

    Args:
        model: A managed model.

    Raises:
        StateError: Nothing of it is managed by overspill.

    Example:
        report = overspill.report(model)
        print(report)
        report.save("report.html")
    """
    from overspill.reporting import report_of

    return report_of(model)
