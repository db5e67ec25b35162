"""`verifiers`: tasksets of verifiers 0.4, which plays the episodes and requests the policy's tokens over HTTP."""

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.verifiers_host import HostSettings, join_host, leave_host
from slipstream.envhub.adapters.verifiers_session import Session
from slipstream.envhub.driving import Ending, Generate, Terms
from slipstream.envhub.env_options import read_secrets


class VerifiersEnv:
    """One episode of an environment of verifiers. Reward components are its rewards, weighted, on the last turn.

    Options: `python`, the interpreter of a Python environment with `verifiers==0.4.*` and `uv`; `config`, verifiers'
    configuration of an environment; `held_out`, the fields of its `taskset` that differ for held-out tasks (without it
    an eighth of the tasks is held out); `renderer`, verifiers' setting (by default the model's); `secrets`, a map from
    a variable of the process that plays to the environment variable of the actor with its value.
    """

    def __init__(
        self,
        *,
        python: str,
        config: Mapping[str, Any],
        held_out: Mapping[str, Any] | None = None,
        renderer: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Raises ValueError for invalid options. verifiers checks `config` itself, when the first episode begins."""
        if not os.access(python, os.X_OK) or Path(python).is_dir():
            raise ValueError(
                f"`env.options.python` must be a Python interpreter, got {python!r}; "
                "create a virtual environment and run `pip install 'verifiers==0.4.*' uv` in it"
            )
        if not isinstance(config.get("taskset"), Mapping) or not config["taskset"]:
            raise ValueError(
                f"`env.options.config` must have a taskset, such as {{taskset: {{id: my_tasks}}}}, got {config!r}"
            )
        read_secrets(secrets)  # raises
        self._settings = partial(
            HostSettings,
            python=python,
            of_verifiers=json.dumps({"config": config, "held_out": held_out, "renderer": renderer}, sort_keys=True),
            secrets=frozenset((secrets or {}).items()),
        )
        self._leave: Callable[[], Awaitable[None]] | None = None

    async def play_episode(self, task: Task, terms: Terms, generate: Generate) -> Ending:
        host = join_host(
            self._settings(
                model_folder=str(terms.tokenizer.name_or_path),
                max_tokens=terms.max_tokens,
                max_turns=terms.max_turns,
                end_tokens=terms.end_tokens,
            )
        )
        session = Session(terms.sampling, generate)
        name = host.begin(task, session)
        self._leave = partial(leave_host, host, name)
        try:
            return await session.ending()
        finally:
            await self.close()

    def columns(self, task: Task) -> Mapping[str, Any]:
        """Return none: verifiers has the tasks."""
        return {}

    async def close(self) -> None:
        """Cancel the running episode and leave the process. Idempotent."""
        leave, self._leave = self._leave, None
        if leave is not None:
            await leave()
