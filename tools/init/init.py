"""`slipstream init env|agent|data NAME`: writes the three files that a person edits, which run as they are."""

import importlib.util
import json
import keyword
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.common.config.env_config import LABEL
from slipstream.common.process.config_error import ConfigError, require

STARTERS = Path(__file__).parent
FILES = {  # what is written, and the starter that it begins as; "": sums
    "env": {"{}.py": "env_starter.py", "{}.yaml": "env.yaml", "test_{}.py": "env_check.py"},
    "agent": {"{}.py": "agent_starter.py", "{}.yaml": "agent.yaml", "{}.jsonl": ""},
    "data": {"{}.py": "data_starter.py", "{}.yaml": "data.yaml", "{}.jsonl": ""},
}


def init(config: Config, *, kind: str, name: str) -> int:
    """Write the files of `kind` into the working directory; return 0. Raises ConfigError, before it has written any."""
    is_name = LABEL.fullmatch(name) is not None and not keyword.iskeyword(name)  # it names a module and a run
    require(is_name, "NAME", "a letter, then letters, digits and '_', at most 32", name, "such as my_task")
    if not Path(f"{name}.py").exists() and importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name} is the name of a module that is installed, which yours would hide; choose another")
    texts = {
        Path(file.format(name)): _named((STARTERS / starter).read_text(), name) if starter else _sums()
        for file, starter in FILES[kind].items()
    }
    if there := [str(path) for path in texts if path.exists()]:
        raise ConfigError(f"{', '.join(there)} exists; choose another name, or go to another folder")
    for path, text in texts.items():
        with path.open("x") as file:
            file.write(text)
    model = "" if kind == "env" else "model.path=FOLDER "
    print(f"wrote {', '.join(map(str, texts))}; edit them, then: slipstream up {name}.yaml {model}run.name={name}")
    return 0


def _named(text: str, name: str) -> str:
    return text.replace("slipstream.tools.init.env_starter", name).replace("NAME", name)


def _sums() -> str:
    """Rows of prompts and answers, no two alike."""
    pairs = [(a, b) for a in range(2, 12) for b in range(10, 20)]
    return "".join(json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) + "\n" for a, b in pairs)
