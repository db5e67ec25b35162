"""`verifiers`: tasksets of verifiers 0.4. It plays the episodes, and the policy is asked over its wire for tokens."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.trajectory import Task
from envhub.driving import Asked, Reply, Terms
from envhub.env import EnvError
from envhub.adapters.verifiers_host import HostSettings, VerifiersHost, join_host, leave_host
from envhub.adapters.verifiers_session import Session


class VerifiersEnv:
    """One episode of an environment of verifiers. Reward components are its rewards, weighted, on the last turn.

    Options: `python`, the interpreter of an environment with `verifiers==0.4.*` and `uv`; `config`, what verifiers
    calls the configuration of an environment; `held_out`, what is different in its `taskset` for held-out tasks, else
    an eighth of the tasks; `renderer`, verifiers' own, else it goes by the model; `secrets`, which says by name (a
    variable of the process that plays) in which environment variable of the actor its value is.
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
        """Raises ValueError for options that do not fit; what verifiers makes of `config` is seen when it plays."""
        if not os.access(python, os.X_OK) or Path(python).is_dir():
            raise ValueError(
                f"`env.options.python` must be an interpreter, got {python!r}; "
                "make an environment and run `pip install 'verifiers==0.4.*' uv` there"
            )
        if not (isinstance(config, Mapping) and isinstance(config.get("taskset"), Mapping) and config["taskset"]):
            raise ValueError(
                f"`env.options.config` must have a taskset, as {{taskset: {{id: my_tasks}}}}, got {config!r}"
            )
        missing = [ours for ours in (secrets or {}).values() if ours not in os.environ]
        if missing:
            raise ValueError(f"`env.options.secrets` names {missing}, which the actor's environment does not have")
        self._python = python
        self._config = json.dumps(config, sort_keys=True)
        self._held_out = json.dumps(held_out, sort_keys=True)
        self._renderer = json.dumps(renderer, sort_keys=True)
        self._secrets = frozenset((secrets or {}).items())
        self._host: VerifiersHost | None = None
        self._session: Session | None = None
        self._name = ""

    async def begin(self, task: Task, terms: Terms) -> Asked:
        """Start `task`; what is asked for first. Raises EnvError."""
        await self.close()
        self._host = join_host(
            HostSettings(
                config=self._config,
                held_out=self._held_out,
                renderer=self._renderer,
                python=self._python,
                secrets=self._secrets,
                model_folder=str(terms.model_folder),
                max_tokens=terms.max_tokens,
                max_turns=terms.max_turns,
                end_tokens=terms.end_tokens,
            )
        )
        self._session = Session(sampling=terms.sampling)
        self._name = self._host.begin(task, self._session)
        return await self._session.next()

    async def answer(self, reply: Reply) -> Asked:
        """Answer what was asked for last. Raises EnvError where the environment fails."""
        if self._session is None:
            raise EnvError("no episode is running; call begin first")
        self._session.answer(reply)
        return await self._session.next()

    async def close(self) -> None:
        """Cut off what is running, and let go of the process. Idempotent."""
        host, session, self._host, self._session = self._host, self._session, None, None
        if host is None or session is None:
            return
        host.end(self._name)
        session.close()
        await leave_host(host)
