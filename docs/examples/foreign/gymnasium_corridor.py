"""A Gymnasium environment of one's own. For Slipstream its states and actions were given words, at the end.

How to start it: foreign.yaml.
"""

from typing import Any

import gymnasium as gym

from slipstream.envhub.gym_speech import Speech  # changed: a new line


class Corridor(gym.Env[int, int]):
    """Find the door: 0 goes left, 1 goes right."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Discrete(9)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._door = 4, int(self.np_random.choice([0, 8]))
        return self._place, {"door": self._door}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._place += 1 if action else -1
        is_there = self._place == self._door
        return self._place, float(is_there), self._place in (0, 8), False, {"door": self._door}


gym.register("Corridor-v0", entry_point=Corridor, max_episode_steps=8)

SPEECH = Speech(  # changed: a new statement
    rules="You stand in a corridor with places 0 to 8. Reply left or right, one word, until you are at the door.",
    show=lambda moment: f"You are at {moment.observation}, the door is at {moment.info['door']}.",
    parse=lambda moment, action: {"left": 0, "right": 1}.get(action.strip().lower().rstrip(".")),
    score=lambda ending: float(ending.last_reward > 0),
)
