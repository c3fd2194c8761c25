"""What nanomodel's `utils.offload` gives to quantizers that work layer by layer, built on `offload` and `restore`.

Note: what an offloaded module looks like. There, its parameters are on the meta device until it is undone. Here they
are the objects that they were, with true shapes, values and ties, and the module runs and trains meanwhile. What
callers ask `is_meta_module` is whether a module must be undone before its weights are in memory, so that is what it
answers: `if is_meta_module(m): undo_offload_to_disk(m)` means what it meant.

Note: what raises here and did nothing there. Offloading what is on disk already, and undoing what was never offloaded.
A module with nothing large enough in it is left alone here too, and a log entry says so. Nor does `set_submodule` add a
module where there was none: the path is a slip.
"""

import itertools
import logging
import os
from collections.abc import Collection

import torch
from torch import nn

from overspill.api import offload
from overspill.errors import PlanError
from overspill.moving import tier_of
from overspill.offloading import NothingToOffloadError, restore_parts
from overspill.plan import Tier
from overspill.selecting import find_modules

logger = logging.getLogger(__name__)

__all__ = ["get_module_fullname", "is_meta_module", "offload_to_disk", "set_submodule", "undo_offload_to_disk"]


def offload_to_disk(
    module: nn.Module | Collection[str], model: nn.Module | None = None, disk_path: str | os.PathLike[str] = "."
) -> None:
    """Move the weights of `module` to files, from where they are read whenever they are used.

    Leaves that hold less than 4 KB stay in memory. No file is overwritten that was not written by this very model.

    Args:
        module: A module, be it a container or the model itself, or dotted paths of modules in `model`.
        model: What `module` is a part of. None: of nothing, so it needs a folder of its own.
        disk_path: Each module gets a folder in this one, named by its dotted path in `model`.

    Raises:
        PlanError: A path or module that is not in the model.
        StateError: It is on disk already.
        OffloadFolderError: The folder is another model's or another user's, or cannot be written.
    """
    target, paths = _find(module, model)
    try:
        offload(target, to="disk", modules=paths, folder=disk_path)
    except NothingToOffloadError as nothing:
        logger.info("%s", nothing)


def _find(
    module: nn.Module | Collection[str], model: nn.Module | None
) -> tuple[nn.Module, str | Collection[str] | None]:
    """What to offload, as the verb wants it: a model, and paths in it."""
    if not isinstance(module, nn.Module):
        if model is None:
            raise PlanError(f"{module!r} means nothing without the model that it is in. Pass model=")
        return model, module
    if model is None:
        return module, None
    return model, get_module_fullname(model, module)


def undo_offload_to_disk(
    module: nn.Module,
    device: torch.device | str | int | None = None,
    include_buffers: bool = True,
    delete_offload_folders: bool = True,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Make all that is offloaded in `module` ordinary tensors in memory again. Returns `module`.

    Args:
        module: What was offloaded, a part of it, or a model with such modules in it.
        device: Where to. None: where each tensor was before.
        include_buffers: Whether `device` and `dtype` are for buffers too. They come back in any case.
        delete_offload_folders: Remove the files that were written for it, and the folders that are empty then.
        dtype: Cast floating-point parameters and buffers to this. None: each keeps its own.

    Raises:
        StateError: Nothing of it is offloaded.
        PlanError: `include_buffers=False` without a device or dtype, which has no effect.
    """
    if not include_buffers and device is None and dtype is None:
        raise PlanError("include_buffers=False has no effect without device or dtype. Leave it out")
    restore_parts(
        module, modules=None, device=device, dtype=dtype, delete=delete_offload_folders, buffers=include_buffers
    )
    return module


def get_module_fullname(model: nn.Module, module: nn.Module) -> str:
    """The dotted path of a module in a model: the first if it hangs at several, "" for the model itself.

    Args:
        model: What it is in.
        module: The module, or a wrapper around it, with that in its `module` attribute.

    Raises:
        PlanError: It is not in the model.
    """
    paths: dict[nn.Module, str] = {part: path for path, part in model.named_modules()}
    wanted: object = module
    while isinstance(wanted, nn.Module):
        if wanted in paths:
            return paths[wanted]
        wanted = getattr(wanted, "module", None)
    raise PlanError(
        f"this {type(module).__name__} is not a part of the {type(model).__name__}. Pass the model that holds it, "
        "and the module that is in the model now: a replaced one is not"
    )


def set_submodule(root: nn.Module, path: str, new_mod: nn.Module) -> None:
    """Put a module in another one's place.

    Args:
        root: The model.
        path: Dotted path of what is there, also in a list by its index.
        new_mod: What is there from then on.

    Raises:
        PlanError: Nothing is at that path, or the model itself.
    """
    (found,) = find_modules(root, path)
    if not found:
        raise PlanError("path='' is the model itself, which is in no module's place. Name a module in it")
    root.set_submodule(found, new_mod, strict=True)


def is_meta_module(m: nn.Module) -> bool:
    """Whether a tensor of a module, or of one in it, is offloaded or on meta: not in memory to compute with.

    True for each tier that overspill offloads to, where parameters show true shapes and a real device nevertheless.

    Args:
        m: The module.
    """
    return any(t.is_meta or tier_of(t) is not Tier.DEVICE for t in itertools.chain(m.parameters(), m.buffers()))
