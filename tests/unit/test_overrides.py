"""Attributes that are overridden for a while are restored afterwards, whatever fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_frozen_patch.common.overrides import overridden

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


class Fixed:
    """Accepts no new attribute."""

    __slots__ = ("__dict__",)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_a_failure_half_way_is_undone() -> None:
    owner = SimpleNamespace(old=1)
    with pytest.raises(AttributeError, match="any"), overridden([(owner, "old", 2), (Fixed(), "any", 3)]):
        raise AssertionError("not reached")
    assert vars(owner) == {"old": 1}


def test_one_attribute_twice() -> None:
    owner = SimpleNamespace()
    with overridden([(owner, "new", 1), (owner, "new", 2)]):
        assert owner.new == 2
    assert vars(owner) == {}


def test_an_exception_inside() -> None:
    owner = SimpleNamespace(old=1)
    with pytest.raises(KeyError), overridden([(owner, "old", 2)]):
        raise KeyError
    assert vars(owner) == {"old": 1}
