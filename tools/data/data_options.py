"""The options of `slipstream data`: which rows it reads, and which it keeps."""

import math
from dataclasses import dataclass

from slipstream.common.config.setting_bounds import Share, ShareBelow1, check_bounds
from slipstream.common.process.config_error import ConfigError, require
from slipstream.common.text.action_format import ToolCalls, action_format


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    data: tuple[str, ...] = ()  # .jsonl, .json or .parquet files, or hub:NAME:SPLIT, in any shape of docs/data.md
    successes: bool = False  # drop rows whose `success` is not true
    min_return: float = -math.inf  # drop rows with a lower `return`
    action_format: str = ""  # drop rows with a reply in another format than this env.action_format; empty: any reply
    near_duplicates: Share = 0.0  # drop rows this similar to an earlier one (Jaccard, 5-word runs); 0: equal rows only
    judge: str = ""  # a YAML file with a judge, which marks the rows that passed all filters; see docs/data.md
    min_mark: Share = 0.0  # drop rows with a lower mark
    held_out: ShareBelow1 = 0.0  # fraction of the tasks whose rows go to a second file
    noise: Share = 0.0  # add a copy of each row, with typing errors in this share of the words of its observations

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        if given := self.action_format:
            is_text = not isinstance(action_format(given), ToolCalls)
            require(is_text, "--action-format", "a format of text", given, "calls are read by the engine's parser only")
        if self.min_mark and not self.judge:
            raise ConfigError("`--min-mark` has no effect without `--judge`; name the judge, or leave it out")
