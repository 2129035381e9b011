# covers: lib/models/nested.py
from collections import OrderedDict, namedtuple

import torch

from lib.models.nested import list_tensors, map_tensors

ONE, TWO, THREE = (torch.tensor(number) for number in (1, 2, 3))


def test_tensors_are_found_in_order() -> None:
    nested = ((ONE, None, [TWO]), {"b": "text", "a": {"c": THREE}})
    assert [int(tensor) for tensor in list_tensors(nested)] == [1, 2, 3]
    pair = namedtuple("pair", "first second")
    assert list_tensors(OrderedDict(x=pair(ONE, 0))) == [ONE]
    assert list_tensors(5) == []


def test_tensors_are_replaced_and_the_rest_stays() -> None:
    rest = object()
    nested = ((ONE, rest, [TWO]), {"a": THREE})
    assert map_tensors(lambda tensor: tensor + 1, nested) == ((2, rest, [3]), {"a": 4})
    assert nested == ((1, rest, [2]), {"a": 3})
