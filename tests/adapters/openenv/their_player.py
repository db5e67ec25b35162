"""Plays with OpenEnv's own GenericEnvClient: `python their_player.py URL RESET [ACTION ...]` prints the results."""

import json
import sys

from openenv.core import GenericEnvClient

url, reset, *actions = sys.argv[1:]
with GenericEnvClient(base_url=url).sync() as env:
    results = [env.reset(**json.loads(reset)), *[env.step({"message": action}) for action in actions]]
    played = [{"observation": r.observation, "reward": r.reward, "done": r.done} for r in results]
    print(json.dumps({"results": played, "state": env.state()}))
