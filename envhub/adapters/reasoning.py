"""`reasoning_gym`: one question and one answer, from the data sets of the package reasoning-gym."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.global_random import GlobalRandom
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.env_options import check_known
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered, opened
from slipstream.envhub.isolation.own_thread import in_own_thread
from slipstream.envhub.package import require_package
from slipstream.envhub.task_seed import split_of, task_rng

log = logging.getLogger(__name__)

INSTALL = "'reasoning-gym==0.1.19'"
MAX_DRAWS = 200  # attempts to draw a question of the split; one question in eight is held out
MAX_ANSWER_CHARS = 4000

# These data sets pass an answer to Python's eval, directly or through sympy's parse_expr, which would run a policy's
# code. So they get only answers that cannot call a function and whose evaluation is cheap.
_LISTED = re.compile(r"(?!.*\bfor\b)[\w\s\[\],'\"]{0,2000}", re.ASCII | re.DOTALL)
_ARITHMETIC = re.compile(r"(?!.*\*\s*\*)[\d\s+\-*/()]{0,200}", re.ASCII | re.DOTALL)
# complex_arithmetic gives full marks to an answer that is not a number.
_COMPLEX = re.compile(r"[\d\s+\-.ij()]{0,200}", re.ASCII)
SCREENS = {
    "binary_matrix": _LISTED,
    "n_queens": _LISTED,
    "spiral_matrix": _LISTED,
    "string_insertion": _LISTED,
    "countdown": _ARITHMETIC,
    "complex_arithmetic": _COMPLEX,
}
REFUSED = {
    "simple_integration": "it evaluates the policy's answer as code",
    "intermediate_integration": "it evaluates the policy's answer as code",
    "polynomial_multiplication": "it evaluates the policy's answer as code",
    "isomorphic_strings": "it draws in the order of a set of strings, which differs between processes",
    "ransom_note": "it draws in the order of a set of strings, which differs between processes",
    "game_of_life_halting": "every answer without True earns full marks",
    "puzzle24": "any numbers that make 24 earn full marks, such as 6 + 6 + 6 + 6, whatever numbers the question gave",
    "composite": "use one of its data sets; the curriculum mixes tasks",
}


@dataclass(kw_only=True, slots=True)
class _Episode(Begun):
    data: Any  # the reasoning_gym data set of the one question
    entry: Mapping[str, Any]


class ReasoningEnv(EpisodeEnv[_Episode]):
    """One question; the policy's first action is the answer. The reward component is `solved`, the data set's score.

    Options: `dataset`, its name in reasoning-gym, and `settings`, the fields of its configuration.
    """

    def __init__(self, *, dataset: str = "chain_sum", settings: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError if reasoning-gym is missing, or the data set or the settings are invalid."""
        if dataset in REFUSED:
            raise ValueError(f"`env.options.dataset` {dataset} is not supported: {REFUSED[dataset]}")
        self._gym = require_package("reasoning_gym", install=INSTALL)
        self._dataset, self._settings = dataset, dict(settings or {})
        names = self._gym.factory.DATASETS
        check_known("dataset", dataset, names, of=f"reasoning-gym's {len(names)}", usual="chain_sum")
        try:
            self._data(seed=0)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"`env.options.settings` {self._settings} do not fit {dataset}: {error}") from error

    async def reset(self, task: Task) -> Observation:
        self._episode = await in_own_thread(f"reasoning_gym {self._dataset}", lambda: self._drawn(task))
        return opened(self._episode.entry["question"])

    async def _act(self, episode: _Episode, action: str) -> Observation:
        answer = action.strip()
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            return answered(f"say the answer, in at most {MAX_ANSWER_CHARS} characters", {"solved": 0.0}, valid=False)
        score = await in_own_thread(f"reasoning_gym {self._dataset}", lambda: self._score(episode, answer))
        return answered("right" if score == 1.0 else "wrong", {"solved": score}, terminated=True, score=score)

    def state_key(self) -> str:
        episode = self._started()
        return f"{episode.task.task_id} {'answered' if episode.is_over else 'asked'}"

    def expert(self) -> str:
        """Return the answer. Raises NotImplementedError if the data set does not give one."""
        answer = self._running().entry["answer"]
        if not isinstance(answer, str) or not answer:
            raise NotImplementedError(f"{self._dataset} does not give an answer")
        return answer

    def _data(self, *, seed: int) -> Any:
        return self._gym.create_dataset(self._dataset, **{**self._settings, "seed": seed, "size": 1})

    def _drawn(self, task: Task) -> _Episode:
        """Draw questions until one belongs to the split of `task`. Raises EnvError if none does."""
        rng = task_rng(task, world=f"reasoning_gym/{self._dataset}")
        for _ in range(MAX_DRAWS):
            seed = rng.getrandbits(31)
            with GlobalRandom(seed).within():
                data = self._data(seed=seed)
                entry = data[0]
            if split_of(entry["question"]) == task.split:
                return _Episode(task=task, data=data, entry=entry)
        raise EnvError(f"{self._dataset} with {self._settings} has too few questions to keep the splits apart")

    def _score(self, episode: _Episode, answer: str) -> float:
        """Return the data set's score in [0, 1]; 0 for an answer that its screen rejects."""
        screen = SCREENS.get(self._dataset)
        if screen is not None and answer != episode.entry["answer"] and screen.fullmatch(answer) is None:
            return 0.0
        try:
            score = float(episode.data.score_answer(answer, episode.entry))
        except Exception as error:  # a few scorers fail on answers that do not have the expected form, with any error
            log.warning("the scorer of %s fails on an answer, which counts as wrong: %r", self._dataset, error)
            return 0.0
        return score if math.isfinite(score) else 0.0
