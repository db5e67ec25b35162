"""A module in memory with functions of a user's."""

import functools
import inspect
import sys
import types
from typing import Any

import pytest

OWN = "own_rewards"


class Own(types.ModuleType):
    """A module of the user's, to which a test adds functions. They become async, so that they are called here."""

    def __setattr__(self, name: str, value: Any) -> None:
        @functools.wraps(value)
        async def called(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        super().__setattr__(name, called)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Own:
    own = Own(OWN)
    monkeypatch.setitem(sys.modules, OWN, own)
    return own
