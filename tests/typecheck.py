"""How the learner's annotations are checked while tests run."""

from beartype import BeartypeConf, beartype

# An int is a float where a float is asked for, as everywhere in Python's typing.
typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
