"""A taskset of verifiers: one sum each. Nothing was changed for Slipstream, see verifiers_sums.yaml."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    wanted: str


class SumTask(vf.Task[SumData, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.wanted)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            yield SumTask(SumData(prompt=f"{number}+1?", wanted=str(number + 1)), self.config.task)


__all__ = ["Sums"]
