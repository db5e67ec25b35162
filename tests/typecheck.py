"""How the learner's annotations are checked while tests run."""

from collections.abc import Iterator
from contextlib import contextmanager

from beartype import BeartypeConf, beartype
from jaxtyping import config

# An int is a float where a float is asked for, as everywhere in Python's typing.
typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))


@contextmanager
def unchecked() -> Iterator[None]:
    """As where no test runs: for what calls the same functions so often that their checks take most of the time."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)
