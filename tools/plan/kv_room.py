"""How many bytes an actor's engine gets for keys and values on a GPU that it shares with the learner.

`python -P -m slipstream.tools.plan.kv_room CONFIG.yaml GPU_BYTES` prints them. It plans a step on a fake GPU.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.plan.memory import kv_beside_learner
from slipstream.tools.plan.plan import measure
from slipstream.tools.run.check_input import check_model_config
from slipstream.tools.run.child import EXIT_BAD_INPUT


def main(arguments: Sequence[str]) -> int:
    """Print the bytes, or why there is no room; return the exit code."""
    try:
        config = load_config(arguments[0], [])
        check_model_config(Path(config.model.path))
        print(kv_beside_learner(config, measure(config), gpu_bytes=int(arguments[1])))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
