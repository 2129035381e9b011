"""Find and replace the tensors in nested arguments and results of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in order. It may nest tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    return [tensor for item in items for tensor in list_tensors(item)]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of a value with the result of a function for each tensor, in the same order.

    Tuples, lists and dictionaries are copied, but not objects of their subclasses.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_tensors(function, item) for item in value)
    return value
