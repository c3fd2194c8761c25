"""Which modules of a model a verb means: dotted paths looked up, with wrappers seen through and slips explained."""

import difflib
from collections.abc import Collection, Sequence

from torch import nn

from overspill.errors import PlanError
from overspill.tensors import TensorGroup
from overspill.units import is_below, owner_path


def find_modules(model: nn.Module, paths: str | Collection[str] | None) -> list[str]:
    """The paths of the modules that `paths` name, below one another left out. None: the model itself."""
    if paths is None:
        return [""]
    given = [paths] if isinstance(paths, str) else list(paths)
    if not given:
        raise PlanError("modules=[] names nothing. Leave it out to mean all of the model")
    found = list(dict.fromkeys(_find(model, path) for path in given))
    return [path for path in found if not any(path != other and is_below(path, other) for other in found)]


def holds(paths: Sequence[str], group: TensorGroup) -> bool:
    """Whether one of the places that show a tensor is below one of `paths`."""
    return any(is_below(owner_path(place), path) for place in group.places for path in paths)


def _find(model: nn.Module, path: str) -> str:
    module, steps = model, []
    for name in path.split(".") if path else []:
        # A wrapper that holds the real module in `.module` is no part of the name that people know it by.
        while name not in module._modules and isinstance(module._modules.get("module"), nn.Module):
            module = module.get_submodule("module")
            steps.append("module")
        child = module._modules.get(name)
        if child is None:
            raise PlanError(_unknown(model, path))
        module = child
        steps.append(name)
    return ".".join(steps)


def _unknown(model: nn.Module, path: str) -> str:
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    near = difflib.get_close_matches(path, known, n=3, cutoff=0.4) or known[:3]
    shown = ", ".join(repr(name) for name in near) or "no modules in it"
    return f"the model has no module {path!r}. Near to it are {shown}"
