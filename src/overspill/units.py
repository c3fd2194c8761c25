"""Cut the module tree into units: the parts of a model that move as one.

Note: what becomes what.
  a block      a module of a no-split class, else a child of a ModuleList or Sequential of alike children: a unit,
               however small. Outermost wins. Larger than the limit, it is cut into its children, each a block again.
  a leaf       outside blocks, a module without parameterised children, or one that has parameters of its own next to
               them (such modules often use their children's weights without calling them): a unit, or stays if small.
  a container  everything above those. Its own tensors stay if small; a large one is a unit without a root.
  a tie        tensors under the same set of roots make one unit. So an embedding tied to a head is one unit of two
               roots, and a weight that two blocks share is a unit of its own, which both of them need.
"""

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from overspill.config import DEVICE_ALIGNMENT, SMALL_TENSOR, align
from overspill.errors import PlanError
from overspill.tensors import Place, TensorGroup, tensor_groups

_TRIVIAL = 1000
"""What is smaller than SMALL_TENSOR, and less than one part in this many of what it belongs to, is not worth a unit."""

_CARRIED = "_no_split_modules"  # where Transformers' models say what their blocks are
_LISTS = (nn.ModuleList, nn.Sequential)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NEVER_CUT = (nn.MultiheadAttention, nn.RNNBase)  # they pass their children's weights to kernels, calling no child


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The part of a model that moves as one."""

    name: str
    """The path of its first root, where no other unit has that name already; else its first tensor's."""
    roots: tuple[str, ...]
    """Paths of the modules whose forward needs it. Empty: no forward announces it, so it is read in place."""
    tensors: tuple[str, ...]
    """Its tensors by `TensorGroup.name`, in definition order."""
    nbytes: int
    """What its slab takes: after the cast to the plan's dtype, each tensor aligned."""
    compute: float
    """Multiply-adds a token, roughly: elements of its weight matrices, none for looking up an embedding."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model in units, and what is too small to move."""

    units: tuple[Unit, ...]
    stays: tuple[str, ...]
    """Names of the tensors that never leave the compute device."""
    stays_nbytes: int


def cut(
    model: nn.Module,
    *,
    no_split_modules: Collection[str] | None = None,
    limit: int | None = None,
    dtype: torch.dtype | None = None,
) -> Cut:
    """Cut `model` into units. A root that needs more than `limit` bytes at once is cut into its children."""
    return Cutter(model, no_split_modules=no_split_modules, dtype=dtype)(limit)


class Cutter:
    """`cut` for several limits: the model is measured once."""

    def __init__(
        self,
        model: nn.Module,
        *,
        no_split_modules: Collection[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._tree = _Tree(model, no_split_modules, dtype)
        self.groups: Mapping[str, TensorGroup] = self._tree.groups

    def __call__(self, limit: int | None) -> Cut:
        opened: set[str] = set()
        while True:
            found = self._tree.cut(opened)
            needs = {} if limit is None else root_needs(found.units)
            large = {root for root, need in needs.items() if limit is not None and need > limit}
            more = {root for root in large if self._tree.can_open(root)}
            if not more:
                return found
            opened |= more


def cut_by(
    model: nn.Module,
    where: Mapping[str, Hashable],
    *,
    home: Hashable,
    no_split_modules: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Cut:
    """Cut `model` so that the tensors of a unit all have one place in `where` (by `TensorGroup.name`).

    Small modules stay on the compute device if `where` gives them `home`; sent elsewhere, they are units.
    """
    tree = _Tree(model, no_split_modules, dtype)
    opened: set[str] = set()
    while True:
        found = tree.cut(opened, where, home)
        places: dict[str, set[Hashable]] = defaultdict(set)
        for unit in found.units:
            if len(unit.roots) == 1:  # what several roots share is a unit of its own already
                places[unit.roots[0]].add(where[unit.tensors[0]])
        more = {root for root, several in places.items() if len(several) > 1 and tree.can_open(root)}
        if not more:
            return found
        opened |= more


def cut_out(model: nn.Module, paths: Collection[str], moving: Collection[str]) -> Cut:
    """Units of the tensors named in `moving`, which lie below the modules at `paths`; all others stay.

    The units are those of the whole model, or parts of them: below a path that lies inside a block, the module at the
    path is the root, so that it streams also when it is called by itself.
    """
    groups = tensor_groups(model)
    tree = _Tree(model, None, None, moving={id(groups[name].tensor) for name in moving})
    return tree.cut_out(paths, moving)


def slab_size(group: TensorGroup, dtype: torch.dtype | None) -> int:
    """What a tensor takes in a slab once it is loaded as `dtype`. What no checkpoint stores is not cast."""
    if is_lazy(group.tensor):
        raise PlanError(f"{group.name} has no shape yet. Run the lazy module on an example before planning")
    weight = group.persistent and group.tensor.is_floating_point()
    cast = dtype if weight and dtype is not None else group.tensor.dtype
    return align(group.tensor.numel() * cast.itemsize, DEVICE_ALIGNMENT)


def root_needs(units: Iterable[Unit]) -> dict[str, int]:
    """The bytes that each root needs at once. A unit without roots is read by itself, and stands for its own root."""
    needs: dict[str, int] = defaultdict(int)
    for unit in units:
        for root in unit.roots or (unit.name,):
            needs[root] += unit.nbytes
    return dict(needs)


class _Facts(NamedTuple):
    """What a module holds, itself and below."""

    nbytes: int  # of what can move; a tie within it counts at each place
    owns: bool  # parameters of its own
    leaf: bool  # nothing that can move in its children
    named: bool  # a no-split class is here or below
    blocks: frozenset[str]  # names of its children that are blocks by being alike
    has_blocks: bool  # of either sort, here or below


@dataclass(frozen=True)
class _Roots:
    """Which root each module belongs to, when some modules are cut into their children."""

    opened: Set[str]
    of: dict[str, str | None] = field(default_factory=dict)  # by module path; None: a container
    floor: dict[str, int] = field(default_factory=dict)  # by root: a unit smaller than this stays

    def needing(self, group: TensorGroup) -> tuple[str, ...]:
        """The roots that a tensor is under, in definition order."""
        roots = [self.of[owner_path(place)] for place in group.places]
        if len(roots) == 1:  # by far the most
            return () if roots[0] is None else (roots[0],)
        return tuple(dict.fromkeys([root for root in roots if root is not None]))


class _Tree:
    """The module tree with its sizes, which is measured once and cut as often as needed."""

    def __init__(
        self,
        model: nn.Module,
        no_split: Collection[str] | None,
        dtype: torch.dtype | None,
        moving: Collection[int] = (),
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise PlanError(
                f"weights cannot be cast to {dtype}. Give a floating-point dtype, or None to keep each one's"
            )
        self._model = model
        self.groups = tensor_groups(model)
        self._sizes = {name: slab_size(group, dtype) for name, group in self.groups.items()}
        self._moves = {
            id(group.tensor): self._sizes[name]
            for name, group in self.groups.items()
            if group.kind == "parameter" or self._sizes[name] >= SMALL_TENSOR or id(group.tensor) in moving
        }
        self._whole = sum(self._sizes.values())
        self._no_split = _no_split_classes(model, no_split)
        self._facts: dict[int, _Facts] = {}
        self._measure(model)

    def can_open(self, root: str) -> bool:
        """Whether there are children that `root` can be cut into."""
        try:
            module = self._model.get_submodule(root)
        except AttributeError:  # a unit without roots stands for itself, and is a tensor
            return False
        return not self._facts[id(module)].leaf and not isinstance(module, _NEVER_CUT)

    def cut(self, opened: Set[str], where: Mapping[str, Hashable] | None = None, home: Hashable = None) -> Cut:
        """Units with the modules at `opened` cut into their children, none of them across two places of `where`."""
        roots = _Roots(opened)
        self._walk("", self._model, roots, root=None, block_floor=None)
        together: dict[tuple[tuple[str, ...], Hashable], list[str]] = defaultdict(list)
        stays: set[str] = set()
        for name, group in self.groups.items():
            place = home if where is None else where[name]
            needed_by = roots.needing(group)
            if id(group.tensor) not in self._moves or (not needed_by and self._sizes[name] < SMALL_TENSOR):
                stays.add(name)
            else:
                together[needed_by, place if needed_by else name].append(name)
        for (needed_by, place), names in together.items():
            floor = self._floor(needed_by, roots) if place == home and needed_by else 1
            if sum(self._sizes[name] for name in names) < floor:
                stays.update(names)
        parts = [(needed_by, names) for (needed_by, _), names in together.items() if names[0] not in stays]
        return Cut(
            units=self._units(parts),
            stays=tuple(name for name in self.groups if name in stays),
            stays_nbytes=sum(self._sizes[name] for name in stays),
        )

    def cut_out(self, paths: Collection[str], moving: Collection[str]) -> Cut:
        """Units of what is `moving`, below `paths`."""
        roots = _Roots(frozenset())
        self._walk("", self._model, roots, root=None, block_floor=None)
        announcing = [path for path in paths if _announces(self._model.get_submodule(path))]

        def root_of(place: Place) -> str | None:
            owner = owner_path(place)
            root = roots.of[owner]
            # The outermost path that the owner is below of, and that is itself below the block.
            inner = [path for path in announcing if is_below(owner, path) and root is not None and is_below(path, root)]
            return min(inner, key=len, default=root)

        together: dict[tuple[tuple[str, ...], str], list[str]] = defaultdict(list)
        for name in (name for name in self.groups if name in moving):
            found = (root_of(place) for place in self.groups[name].places)
            needed_by = tuple(dict.fromkeys(root for root in found if root is not None))
            together[needed_by, "" if needed_by else name].append(name)
        stays = [name for name in self.groups if name not in moving]
        return Cut(
            units=self._units([(needed_by, names) for (needed_by, _), names in together.items()]),
            stays=tuple(stays),
            stays_nbytes=sum(self._sizes[name] for name in stays),
        )

    def _floor(self, needed_by: tuple[str, ...], roots: _Roots) -> int:
        floor = max(roots.floor[root] for root in needed_by)
        if len(needed_by) > 1:  # a small weight that many blocks share is not worth a fetch of its own in each of them
            floor = max(floor, self._trivial(self._whole))
        return floor

    def _units(self, parts: Sequence[tuple[tuple[str, ...], list[str]]]) -> tuple[Unit, ...]:
        taken = {roots[0] for roots, _ in parts if len(roots) == 1}
        named: dict[str, Unit] = {}
        for roots, tensors in parts:
            name = roots[0] if roots else tensors[0]
            if name in named or (len(roots) > 1 and name in taken):
                name = tensors[0]
            named[name] = Unit(
                name=name,
                roots=roots,
                tensors=tuple(tensors),
                nbytes=sum(self._sizes[tensor] for tensor in tensors),
                compute=float(sum(_compute(self.groups[tensor]) for tensor in tensors)),
            )
        return tuple(named.values())

    def _walk(self, path: str, module: nn.Module, roots: _Roots, *, root: str | None, block_floor: int | None) -> None:
        """Note the root of `module` and of all below it. With `block_floor` it is a block; if smaller, it stays."""
        facts = self._facts[id(module)]
        if type(module).__name__ in self._no_split:
            block_floor = 1
        if root is None and path not in roots.opened and self._is_root(path, module, facts, block_floor is not None):
            root = path
            roots.floor[root] = SMALL_TENSOR if block_floor is None else block_floor
        roots.of[path] = root
        below = None if _announces(module) else block_floor  # a list in a list: its children are the blocks
        if path in roots.opened:
            below = self._trivial(facts.nbytes)
        prefix = f"{path}." if path else ""
        for name, child in _children(module):
            floor = 1 if name in facts.blocks else below
            self._walk(prefix + name, child, roots, root=root, block_floor=floor)

    def _is_root(self, path: str, module: nn.Module, facts: _Facts, is_block: bool) -> bool:
        if not facts.nbytes or not _announces(module):
            return False
        uses_children = facts.owns and not facts.has_blocks and path != ""
        return is_block or facts.leaf or uses_children or isinstance(module, _NEVER_CUT)

    def _measure(self, module: nn.Module) -> _Facts:
        if id(module) in self._facts:
            return self._facts[id(module)]
        children = {name: self._measure(child) for name, child in _children(module)}
        own = [self._moves.get(id(tensor), 0) for tensor in (*module._parameters.values(), *module._buffers.values())]
        named = has_blocks = type(module).__name__ in self._no_split
        below = 0
        for child in children.values():
            below += child.nbytes
            named |= child.named
            has_blocks |= child.has_blocks
        blocks = self._alike(module, children)
        owns = any(parameter is not None for parameter in module._parameters.values())
        facts = _Facts(sum(own) + below, owns, not below, named, blocks, has_blocks or bool(blocks))
        self._facts[id(module)] = facts
        return facts

    def _alike(self, module: nn.Module, children: Mapping[str, _Facts]) -> frozenset[str]:
        """Which children of a list are blocks: those of one class, and whatever has parts of its own beside them."""
        if not isinstance(module, _LISTS):
            return frozenset()
        held = {name: child for name, child in _children(module) if children[name].nbytes}
        classes = Counter(type(child) for child in held.values())
        if not held or max(classes.values()) < 2:
            return frozenset()
        sizes = [children[name].nbytes for name in held]
        if max(sizes) < SMALL_TENSOR and sum(sizes) < self._trivial(self._whole):
            return frozenset()
        return frozenset(
            name
            for name, child in held.items()
            # A no-split class deeper down is what the user, or the model, wants to see move.
            if not children[name].named and (classes[type(child)] > 1 or not children[name].leaf)
        )

    @staticmethod
    def _trivial(nbytes: int) -> int:
        return max(1, min(SMALL_TENSOR, nbytes // _TRIVIAL))


def owner_path(place: Place) -> str:
    """The path of the module that a tensor hangs in."""
    return place.path[: -len(place.name) - 1]  # "" for a tensor of the model itself, which has no dot


def modules_below(root: nn.Module) -> list[nn.Module]:
    """`root` and all modules in it, one that is there twice, twice. Quicker than `modules`: short steps wait for it."""
    modules = [root]
    for module in modules:
        if module._modules:
            modules.extend([child for child in module._modules.values() if child is not None])
    return modules


def is_below(path: str, ancestor: str) -> bool:
    """Whether the module at `path` is the one at `ancestor`, or part of it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _announces(module: nn.Module) -> bool:
    """Whether anybody calls it: a ModuleList or ParameterList has no forward."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _compute(group: TensorGroup) -> int:
    if group.kind == "buffer" or group.tensor.ndim < 2 or not group.tensor.is_floating_point():
        return 0
    computes = any(not isinstance(place.module, _EMBEDDINGS) for place in group.places)
    return group.tensor.numel() if computes else 0


def _no_split_classes(model: nn.Module, given: Collection[str] | None) -> frozenset[str]:
    """The names that the user gave, checked; else those that the model and its parts carry, as in Transformers."""
    if given is None:
        # Not by getattr: what nn.Module does for an attribute that is not there takes long, and most have none.
        said = [vars(m).get(_CARRIED) or getattr(type(m), _CARRIED, None) or () for m in model.modules()]
        return frozenset(name for names in said for name in names)
    if isinstance(given, str):
        raise PlanError(f"no_split_modules must be a collection of class names: write [{given!r}]")
    classes = {type(module).__name__: module for module in model.modules()}
    for name in given:
        if name not in classes:
            near = difflib.get_close_matches(name, classes, n=3, cutoff=0.5) or sorted(classes)[:5]
            raise PlanError(f"no_split_modules names {name!r}, but no module has that class. Near: {', '.join(near)}")
        if not _announces(classes[name]):
            raise PlanError(f"no_split_modules names {name!r}, which has no forward. Name the class of its children")
    return frozenset(given)
