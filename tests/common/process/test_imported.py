"""A module of the user's that cannot be imported is named with the reason."""

from pathlib import Path

import pytest

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.imported import imported


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise KeyError('a')", "KeyError: 'a'; correct the module"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--no-such'])", "SystemExit: 2; correct the module"),
    ],
    ids=["raises", "is a program"],
)
def test_what_a_module_raises_is_named(source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"`env.name` 'raising_module:Env': cannot import raising_module: {said}"):
        imported("env.name", "raising_module:Env", type)
