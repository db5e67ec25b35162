"""vLLM in the process of the loop by hand. Import it only in a process that has vllm_environment()."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from slipstream.actors.engine.reload import loaded_on_cpu
from slipstream.actors.engine.vllm_start import CPU_KV_CACHE_BYTES, CPU_OPTIONS, stop_token_ids
from slipstream.common.config.config import Config
from slipstream.tools.lab.peers.episode import Episode


class HandEngine:
    """Plays episodes, as many at a time as there are; new weights are loaded between two calls."""

    def __init__(self, folder: Path, config: Config, *, seed: int) -> None:
        self._stop = stop_token_ids(str(folder))
        self._llm = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                seed=seed,
                dtype="float32",
                max_model_len=config.model.max_tokens,
                max_num_seqs=config.replay.group_size * config.replay.groups_per_step,
                skip_tokenizer_init=True,
                generation_config="vllm",
                enable_prefix_caching=True,
                disable_log_stats=True,
                kv_cache_memory_bytes=config.actors.kv_cache_bytes or CPU_KV_CACHE_BYTES,
                **CPU_OPTIONS,
            )
        )
        self._num_requests = 0

    def play(
        self, episodes: Iterable[Episode], *, temperature: float, ended: Callable[[Episode], Sequence[Episode]]
    ) -> None:
        """Play `episodes` to their end, and those that `ended` begins whenever one has ended."""
        running = {self._request(episode, temperature): episode for episode in episodes}
        while running:
            for output in self._llm.step():
                episode = running.pop(output.request_id)
                episode.answer(list(output.outputs[0].token_ids))
                for following in ended(episode) if episode.done else (episode,):
                    running[self._request(following, temperature)] = following

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sample with `weights` from now on."""
        self._llm.collective_rpc(_load, args=(weights,))
        self._llm.reset_prefix_cache()

    def _request(self, episode: Episode, temperature: float) -> str:
        self._num_requests += 1
        params = SamplingParams(
            temperature=temperature,
            max_tokens=episode.room,
            stop_token_ids=self._stop,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"type": "token", "prompt_token_ids": list(episode.tokens)}
        self._llm.add_request(str(self._num_requests), prompt, params)
        return str(self._num_requests)


def _load(worker: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Load into a copy and swap: a reload in place leaves packed layers of a CPU half-way."""
    loaded_on_cpu(worker.get_model(), dict(weights), worker.model_config).switch()
