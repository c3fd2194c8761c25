"""Transformers' key-value caches, which the blocks of a model fill as they are called."""

import sys
from typing import Any


def is_cache(value: Any) -> bool:
    """Whether it is one, without importing Transformers."""
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def as_it_is(cache: Any) -> Any:
    """A copy that is filled by itself from now on. Its tensors are the same: those are replaced, not edited."""
    kinds = sys.modules["transformers.cache_utils"]
    layers = tuple(getattr(kinds, name) for name in _LAYERS if hasattr(kinds, name))
    return _copied(cache, (kinds.Cache, *layers))


_LAYERS = ("CacheLayerMixin", "LinearAttentionCacheLayerMixin")


def _copied(value: Any, kinds: tuple[type, ...]) -> Any:
    if type(value) is list:
        return [_copied(item, kinds) for item in value]
    if type(value) is dict:
        return {key: _copied(item, kinds) for key, item in value.items()}
    if not isinstance(value, kinds):
        return value
    copied = object.__new__(type(value))
    vars(copied).update(_copied(vars(value), kinds))
    return copied
