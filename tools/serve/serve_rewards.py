"""`slipstream serve rewards FOLDER`: one copy of a reward model for all who collect, evaluate or play."""

import asyncio
import contextlib
import logging
from pathlib import Path

import xxhash

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.reward_protocol import SECRET_VARIABLE, RewardModelCard
from slipstream.common.text.tokenizer import load_tokenizer, text_root
from slipstream.common.transfer.model_folder import blob_of
from slipstream.envhub.remote.env_secret import read_secret
from slipstream.tools.play.state_values import Batches, scorer_in
from slipstream.tools.serve.reward_server import RewardServer
from slipstream.tools.serve.serve_options import RewardsOptions
from slipstream.tools.terminal.loopback import is_loopback

POLL_S = 0.1

log = logging.getLogger(__name__)


def serve_rewards(config: Config, *, folder: Path, options: RewardsOptions) -> int:
    """Serve until a signal; return the exit code. Raises ConfigError."""
    log_to_stderr()
    shutdown = Shutdown()
    with contextlib.ExitStack() as loaded:
        with shutdown.nothing_to_lose():
            try:
                secret = read_secret(options.key_file, option="--key-file", variable=SECRET_VARIABLE)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            scorer = loaded.enter_context(scorer_in(config, folder, policy=None))
            card = RewardModelCard(
                kind=scorer.model.kind,
                model=_root_of(folder),
                reads=text_root(load_tokenizer(folder, config.model.template_arguments)),
                max_tokens=config.model.max_tokens,
            )
        server = RewardServer(Batches(scorer.values), card, vocab_size=scorer.model.vocab_size, secret=secret)
        try:
            asyncio.run(_serve(server, folder, options, secret, shutdown))
        except OSError as error:
            where = f"`--host` {options.host} and `--port` {options.port}"
            raise ConfigError(f"{where} cannot be bound: {error.strerror}; choose others") from None
    return shutdown.exit_code


async def _serve(server: RewardServer, folder: Path, options: RewardsOptions, secret: str, shutdown: Shutdown) -> None:
    async with server.listening(options.host, options.port) as url:
        log.info("serving %s at %s", folder, url)
        if not secret and not is_loopback(options.host):
            log.warning(
                "no authentication: any client that can connect may use the server; set %s or --key-file",
                SECRET_VARIABLE,
            )
        while not shutdown.requested.is_set():  # noqa: ASYNC110 - a signal handler sets it
            await asyncio.sleep(POLL_S)
        log.info("stopping; %d episodes were scored", server.num_scored)


def _root_of(folder: Path) -> str:
    """xxh3-128 in hex over the weights and the configuration in `folder`."""
    paths = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return xxhash.xxh3_128_hexdigest("".join(blob_of(path).root for path in paths).encode())
