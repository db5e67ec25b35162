"""Checks at the start that a tokenizer can write conversations: piece by piece as in one go, and without unknown words.

A conversation is encoded in pieces: prompts, replies that are written as text, answers. They must have the tokens that
the whole conversation has, as every other program encodes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.text.chat import Chat, reply_form
from slipstream.common.text.chat_template import REFUSALS, rendered
from slipstream.common.text.codec import encoder
from slipstream.common.text.thought import thought_marks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PreTrainedTokenizerBase

ASK, REPLY, ANSWER = Message("user", "Where is it?"), "The answer is 4.", Message("user", "Yes, it is 5.")
MAX_UNKNOWN = 0.01  # of all tokens
NUM_SHOWN = 5
TEMPLATE_S = 20.0  # for the conversations of the check, which take milliseconds
TEMPLATE_BYTES = 1 << 30


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError unless the chat template can be rendered, ends, and passes `check_pieces`."""
    failures = list[BaseException]()

    def check() -> None:
        try:
            _check_renders(tokenizer)
            check_pieces(tokenizer)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=check, name="template", daemon=True)
    thread.start()
    thread.join(TEMPLATE_S)
    if thread.is_alive():  # a loop in Jinja is one in Python, which this exception ends
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise ConfigError(
            f"`model.path` {tokenizer.name_or_path}: its chat template had not rendered a conversation of three "
            f"messages after {TEMPLATE_S:.0f} s; correct its loops"
        )
    if failures:
        raise failures[0]


def _check_renders(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError unless the chat template can be rendered, without a system message or with one."""
    system, user = {"role": "system", "content": "probe"}, {"role": "user", "content": "probe"}
    for probe in ([user], [system, user]):
        try:
            with _little_memory():
                rendered(tokenizer, probe, today=datetime.now(UTC), to_reply=True)
        except Exception as error:  # a template may raise anything
            refusal = error
        else:
            return
    raise ConfigError(
        f"`model.path` {tokenizer.name_or_path}: its chat template, with `model.template_arguments`, cannot be "
        f"rendered: {' '.join(str(refusal).split()) or type(refusal).__name__}; correct the template or the arguments"
    ) from refusal


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process take at most TEMPLATE_BYTES more in the block, else it has a MemoryError."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + TEMPLATE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check_pieces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if a reply or an answer has other tokens where it is added than in the whole conversation.

    So does a template whose thoughts cannot be distinguished from answers, or which changes what a policy writes.
    """
    try:
        thought_marks(tokenizer)
        with contextlib.suppress(TemplateError, TypeError, LookupError, AttributeError, ArithmeticError):
            reply_form(tokenizer)  # one that refuses these messages is reported with an environment's own
    except ValueError as error:
        raise ConfigError(f"`model.path` {tokenizer.name_or_path}: {error}") from None
    chat = Chat(tokenizer)
    try:
        pieces = {"the prompt": chat.open((ASK,))}
        pieces["a reply"] = chat.written(reply_form(tokenizer).write(REPLY))
        chat.reply(pieces["a reply"])
        extension = chat.extend((ANSWER,))
    except REFUSALS:  # a template that other checks report, or that changes what is written
        return
    if extension.new_branch:  # it is rendered and encoded whole
        return
    pieces["an answer"] = extension.tokens
    rest = encoder(tokenizer)(chat.text)
    for name, tokens in pieces.items():
        part, rest = rest[: len(tokens)], rest[len(tokens) :]
        if part != tokens:
            first = next(place for place, (one, other) in enumerate(zip(tokens, part, strict=False)) if one != other)
            found, expected = (tokenizer.convert_ids_to_tokens(each[first:][:NUM_SHOWN]) for each in (tokens, part))
            raise ConfigError(
                f"the chat template and the tokenizer in {tokenizer.name_or_path} cannot be used turn by turn: {name} "
                f"has the tokens {found}, and {expected} where the whole conversation is encoded; write a template "
                "whose generation prompt ends with a special token or a line break"
            )


def check_words(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, where: str) -> None:
    """Raise ConfigError if more than MAX_UNKNOWN of the tokens of `texts` are the one for a word that is not known."""
    unknown, num_tokens, words = tokenizer.unk_token_id, 0, Counter[str]()
    for text in texts if unknown is not None and tokenizer.is_fast else ():
        encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        num_tokens += len(encoded.ids)
        both = zip(encoded.offsets, encoded.ids, strict=True)
        words.update(text[start:stop] for (start, stop), token in both if token == unknown)
    if words.total() > MAX_UNKNOWN * num_tokens:
        raise ConfigError(
            f"the tokenizer in {tokenizer.name_or_path} has no token for {words.total()} of the {num_tokens} in "
            f"{where}, such as {', '.join(repr(word) for word, _ in words.most_common(NUM_SHOWN))}: no policy can read "
            f"them; at most {MAX_UNKNOWN:.0%} may be unknown, so choose a model that knows them"
        )
