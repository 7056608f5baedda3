"""Dataset of prompts: read by `prompt_file`, tokenised once, mapped into memory from a cache.

file -> checked rows -> chat template -> tokens -> Arrow IPC file, mapped by all processes of a node

See `prompt_cache` for the cache's content and when it is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.random import PCG64, SeedSequence

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.data.messages import RejectedRow, checked_kwargs
from mcore_rl.data.options import DataOptions
from mcore_rl.data.prompt_cache import tokenised_table
from mcore_rl.data.prompt_file import PromptSource, Responses, check_path
from mcore_rl.data.tokenizer import vocabulary_size
from mcore_rl.data.tokenizer_process import ChatTemplate
from mcore_rl.data.user_prompts import default_cache_dir, prompts_path

logger = logging.getLogger(__name__)

_PROMPT_COLUMNS = ("text", "answer", "token_ids", "row")
# Prefixes of a fingerprint of the tokens, by what a run draws.
_PROMPTS, DEMONSTRATIONS, PAIRS = "tokens:", "demonstrations:", "pairs:"
_KINDS = (_PROMPTS, DEMONSTRATIONS, PAIRS)


class PromptDataset:
    """Prompts of a file within the token limit, in file order, mapped into memory.

    `prompts[i]` takes about 10 us and only holds that row. `Prompt.index` is the row in the file
    (blank lines do not count), which differs from `i` after a longer prompt was dropped.
    `Prompt.text` is the column's value in the file (messages: their contents, separated by blank
    lines); `Prompt.token_ids` is the model's input, including chat template and special tokens.
    """

    kind = _PROMPTS

    def __init__(self, table: pa.Table, max_prompt_tokens: int) -> None:
        """Select prompts from `table` (`prompt_cache.SCHEMA`), with one row per row of the file."""
        num_tokens = table.column("num_tokens").to_numpy()
        self._columns = [table.column(name) for name in _PROMPT_COLUMNS]
        self.rows = np.flatnonzero(num_tokens <= max_prompt_tokens)
        """`[prompts]` int64: row in the file of each prompt."""
        self.num_too_long = table.num_rows - len(self.rows)
        self.min_tokens = int(num_tokens.min())
        self._max_token_ids = table.column("max_token_id").to_numpy()
        self.left_out = _counted(table.column("left_out"))
        """Omitted fields: name -> number of rows of the file, and the first of them (from 0)."""
        digests = table.column("digest").take(pa.array(self.rows)).to_pylist()
        content = hashlib.sha256(b"".join([self.rows.tobytes(), *digests]))
        self.fingerprint = self.kind + content.hexdigest()
        """Digest of the prompts with their tokens; equal for the same prompts."""

    def __len__(self) -> int:
        return len(self.rows)

    def beyond(self, vocabulary: int) -> tuple[int, int] | None:
        """Return row and token of the first prompt with a token that is not below `vocabulary`."""
        largest = self._max_token_ids[self.rows]
        if not (largest >= vocabulary).any():
            return None
        position = int((largest >= vocabulary).argmax())
        return int(self.rows[position]), int(largest[position])

    def are_those_of(self, fingerprint: str) -> bool | None:
        """Return whether a checkpoint with `fingerprint` has drawn from these prompts.

        None: it is from an earlier version, which recorded files instead of tokens."""
        if not fingerprint.startswith(_KINDS):
            return None
        return fingerprint == self.fingerprint

    def follow(self, fingerprint: str) -> bool:
        """Return whether a checkpoint with `fingerprint` has drawn something else than prompts, or
        than what these are: the run begins with these after, for example, demonstrations."""
        return fingerprint.startswith(_KINDS) and not fingerprint.startswith(self.kind)

    def __getitem__(self, position: int) -> Prompt:
        row = int(self.rows[position])
        text, answer, token_ids, columns = (column[row] for column in self._columns)
        # A copy, because torch needs writable memory.
        ids = token_ids.values.to_numpy().copy()
        return Prompt(row, text.as_py(), json.loads(answer.as_py()), ids, columns.as_py())


P = TypeVar("P", bound=PromptDataset)


def chat_template(options: DataOptions, date: str | None = None) -> ChatTemplate:
    """Return the chat template of the flags; `date` as in `ChatTemplate`. Raises UsageError."""
    flag = f"--rl-chat-template-kwargs {options.chat_template_kwargs}"
    try:
        kwargs = checked_kwargs(options.chat_template_kwargs, "it")
    except RejectedRow as error:
        raise UsageError(f": {error.problem}", flag=flag, remedy=error.remedy) from error
    if options.no_chat_template and (kwargs or options.chat_template is not None):
        raise UsageError(
            "has no effect with --rl-no-chat-template",
            flag=flag if kwargs else f"--rl-chat-template {options.chat_template}",
            remedy="drop one of them",
        )
    return ChatTemplate(options.chat_template, kwargs, date)


def prompt_source(
    options: DataOptions,
    path: str,
    flag: str = "--rl-prompts",
    *,
    trust_remote_code: bool = False,
    date: str | None = None,
    responses: Responses | None = None,
    max_response_tokens: int = 0,
) -> PromptSource:
    """Return how to read the prompts file, or source of --rl-import, that `flag` names; with
    `responses` of demonstrations, which share both limits."""
    return PromptSource(
        path=prompts_path(path, options.cache_dir, flag),
        prompt_column=options.prompt_column,
        answer_column=options.answer_column,
        use_chat_template=not options.no_chat_template,
        max_prompt_tokens=options.max_prompt_tokens + max_response_tokens,
        trust_remote_code=trust_remote_code,
        template=chat_template(options, date),
        flag=flag,
        responses=responses,
    )


def load_prompt_files(
    options: DataOptions,
    tokenizer_dir: Path | str,
    *,
    trust_remote_code: bool = False,
    date: str | None = None,
) -> tuple[PromptDataset, PromptDataset | None]:
    """Return training and held-out prompts, from the cache if they were tokenised before.

    `trust_remote_code` is Megatron's --trust-remote-code, `date` the date (ISO) for chat templates;
    None: today.
    """

    def load(path: str, flag: str) -> PromptDataset:
        source = prompt_source(options, path, flag, trust_remote_code=trust_remote_code, date=date)
        return load_prompts(source, tokenizer_dir, cache_dir=options.cache_dir)

    train = load(options.required_prompts(), "--rl-prompts")
    held_out = options.eval_prompts
    return train, None if held_out is None else load(held_out, "--rl-eval-prompts")


def load_prompts(
    source: PromptSource,
    tokenizer_dir: Path | str,
    *,
    cache_dir: Path | str | None = None,
    write_cache: bool = True,
) -> PromptDataset:
    """Map the tokenised prompts into memory; tokenise them first if the cache lacks them.

    Any number of processes may call it at once: one per node tokenises, the others wait for its
    file. `cache_dir` defaults to $XDG_CACHE_HOME/mcore_rl or ~/.cache/mcore_rl. If it cannot be
    written to, the log reports this and a temporary file replaces it. Without `write_cache` it is
    only read, and a temporary file is used directly. The tokenizer runs in a separate process.

    Raises UsageError for the errors of `check_prompts`, a row that the chat template refuses or
    whose content it omits, a folder without a tokenizer or with one that takes too much time or
    memory, a tokenizer without the requested chat template, one whose tokens the model lacks, and a
    limit that no prompt meets.
    """
    return load_rows(
        source, tokenizer_dir, cache_dir=cache_dir, write_cache=write_cache, make=PromptDataset
    )


def load_rows(
    source: PromptSource,
    tokenizer_dir: Path | str,
    *,
    cache_dir: Path | str | None = None,
    write_cache: bool = True,
    make: type[P],
) -> P:
    """Return the rows of a file as a dataset of class `make`, as `load_prompts`."""
    check_path(source)
    folder = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / "prompts"
    tokenizer_dir = Path(tokenizer_dir)
    if not os.path.isdir(tokenizer_dir):
        raise UsageError(
            "is not a folder",
            flag=f"--rl-hf-checkpoint {tokenizer_dir}",
            remedy="give the one of the checkpoint",
        )
    table = tokenised_table(source, tokenizer_dir, folder, write_cache=write_cache)
    prompts = make(table, source.max_prompt_tokens)
    if len(prompts) == 0:
        raise UsageError(
            f"drops every prompt of {source.given}, the shortest of which has "
            f"{prompts.min_tokens} "
            f"tokens{' or more' if table.column('is_cut').to_numpy().all() else ''}",
            flag=source.limit,
            remedy="raise it to at least that",
        )
    vocabulary = vocabulary_size(tokenizer_dir)
    if vocabulary is not None and (beyond := prompts.beyond(vocabulary)) is not None:
        raise UsageError(
            f": its tokenizer writes token {beyond[1]} in prompt {beyond[0] + 1} of "
            f"{source.given}, and config.json has a vocab_size of {vocabulary}",
            flag=f"--rl-hf-checkpoint {tokenizer_dir}",
            remedy="copy the tokenizer that belongs to these weights, or resize the model's "
            "embedding",
        )
    _log_omissions(prompts, source, table.num_rows)
    return prompts


def _log_omissions(prompts: PromptDataset, source: PromptSource, num_rows: int) -> None:
    if prompts.num_too_long:
        logger.warning(
            "%s: %d of %d prompts are longer than %d tokens and left out",
            source.given,
            prompts.num_too_long,
            num_rows,
            source.max_prompt_tokens,
        )
    for name, (count, first) in prompts.left_out.items():
        logger.warning(
            "%s: the model does not get %s, in %d rows (the first is row %d)",
            source.given,
            name,
            count,
            first + 1,
        )


def prompt_indices(num_rows: int, *, start: int, count: int, seed: int) -> np.ndarray:
    """Return positions, `[count]` int64, of the prompts that draws from `start` get.

    The result depends only on the arguments, so a resumed run needs no state and every rank draws
    the same. Every `num_rows` draws from 0 visit each row once, in an order given by (seed, epoch).
    """
    stop = start + count
    pieces = []
    while start < stop:
        epoch, position = divmod(start, num_rows)
        pieces.append(_permutation(num_rows, seed, epoch)[position:][: stop - start])
        start += len(pieces[-1])
    return np.concatenate(pieces)


def prompt_of_draw(prompts: PromptDataset, draw: int, *, seed: int) -> Prompt:
    """Return the prompt of one of a run's draws."""
    row = prompt_indices(len(prompts), start=draw, count=1, seed=seed)[0]
    return prompts[int(row)]


@lru_cache(maxsize=4)  # this epoch and the next, for training and for evaluation
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    # Sort raw bits: numpy guarantees a bit generator's bits across versions, not `permutation`.
    raw = PCG64(SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(raw)  # 64 bits are practically never equal, so every sort agrees


def _counted(left_out: pa.ChunkedArray) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    lengths = left_out.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(lengths):
        for name in left_out[int(row)].as_py():
            count, first = found.get(name, (0, int(row)))
            found[name] = (count + 1, first)
    return found
