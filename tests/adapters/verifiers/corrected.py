"""The same sums, by an environment that asks twice, and one whose agents would both be played by the policy."""

import verifiers.v1 as vf
from verifiers_sums import Sums


class CorrectedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()


class Corrected(vf.Env[CorrectedConfig]):
    async def run(self, task, agents):
        async with agents.solver.interaction(task) as talk:
            await talk.turn()
            await talk.turn("are you sure?")


class CorrectedSums(Sums):
    pass


__all__ = ["Corrected", "CorrectedSums"]
