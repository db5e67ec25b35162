"""A module in memory with functions of a user's."""

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

OWN = "own_rewards"


class Own:
    """A module of the user's, to which a test adds functions. They become async, so that they are called here."""

    def __init__(self, name: str) -> None:
        self.module = types.ModuleType(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            return super().__setattr__(name, value)

        @functools.wraps(value)
        async def called(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        setattr(self.module, name, called)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    own = Own(OWN)
    monkeypatch.setitem(sys.modules, OWN, own.module)
    yield own
