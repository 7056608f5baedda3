"""Prompts: read by `prompt_file`, tokenised once, then mapped into memory from a cache.

file -> checked rows -> chat template -> tokens -> Arrow IPC file, mapped by all processes of a node

See `prompt_cache` for what the cache holds and when it is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.random import PCG64, SeedSequence

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_cache import tokenised_table
from mcore_rl.data.prompt_file import PromptSource, check_path
from mcore_rl.data.tokenizer import vocabulary_size

logger = logging.getLogger(__name__)

_OF_A_PROMPT = ("text", "answer", "token_ids", "row")
_BY_CONTENT = "tokens:"  # begins a fingerprint of what was made


class PromptDataset:
    """The prompts of a file that fit the limit, in file order, mapped into memory.

    `prompts[i]` costs some 10 us and holds nothing but that row. `Prompt.index` is the row in the
    file (blank lines do not count), which differs from `i` once a longer prompt was dropped.
    `Prompt.text` is the column as it stands in the file (messages: their contents, a blank line
    between); `Prompt.token_ids` is what the model gets, chat template and special tokens included.
    """

    def __init__(self, table: pa.Table, max_prompt_tokens: int) -> None:
        """`table` has `prompt_cache.SCHEMA` and one row per row of the file."""
        num_tokens = table.column("num_tokens").to_numpy()
        self._columns = [table.column(name) for name in _OF_A_PROMPT]
        self._rows = np.flatnonzero(num_tokens <= max_prompt_tokens)
        self.num_too_long = table.num_rows - len(self._rows)
        self.min_tokens = int(num_tokens.min())
        self._max_token_ids = table.column("max_token_id").to_numpy()
        self.left_out = _counted(table.column("left_out"))
        """What the template left out: name -> rows of the file, and the first of them (from 0)."""
        digests = table.column("digest").take(pa.array(self._rows)).to_pylist()
        content = hashlib.sha256(b"".join([self._rows.tobytes(), *digests]))
        self.fingerprint = _BY_CONTENT + content.hexdigest()
        """Digest of the prompts with their tokens; equal means the same prompts."""

    def __len__(self) -> int:
        return len(self._rows)

    def beyond(self, vocabulary: int) -> tuple[int, int] | None:
        """Row in the file and token of the first prompt with one that is not below `vocabulary`."""
        largest = self._max_token_ids[self._rows]
        for position in np.flatnonzero(largest >= vocabulary)[:1]:
            return int(self._rows[position]), int(largest[position])
        return None

    def are_those_of(self, fingerprint: str) -> bool | None:
        """Whether a checkpoint that noted `fingerprint` has drawn from these prompts; None if an
        earlier version noted it, of the files and not of the tokens."""
        if not fingerprint.startswith(_BY_CONTENT):
            return None
        return fingerprint == self.fingerprint

    @property
    def rows(self) -> np.ndarray:
        """`[prompts]` int64: which row of the file each is."""
        return self._rows

    def __getitem__(self, position: int) -> Prompt:
        row = int(self._rows[position])
        text, answer, token_ids, columns = (column[row] for column in self._columns)
        # A copy, because torch wants memory that may be written to.
        ids = token_ids.values.to_numpy().copy()
        return Prompt(row, text.as_py(), json.loads(answer.as_py()), ids, columns.as_py())


def load_prompts(
    source: PromptSource,
    tokenizer_dir: Path | str,
    *,
    cache_dir: Path | str | None = None,
    flag: str = "--rl-prompts",
    write_cache: bool = True,
) -> PromptDataset:
    """Maps the tokenised prompts, after tokenising them where the cache has none yet.

    Any number of processes may call it at once: one of a node tokenises, the others wait for its
    file. `cache_dir` is $XDG_CACHE_HOME/mcore_rl or ~/.cache/mcore_rl unless given; one that cannot
    be written to is reported in the log and replaced by a temporary file; without `write_cache` it
    is only read, and that file is taken at once. The tokenizer runs in a process of its own.

    Raises UsageError for all that `check_prompts` raises it for, for a row that the chat template
    refuses or leaves out, for a folder without a tokenizer or with one that takes too much time or
    memory, a tokenizer without the chat template asked for, one whose tokens the model does not
    have, and a limit that no prompt meets.
    """
    check_path(source, flag)
    folder = (Path(cache_dir) if cache_dir is not None else _default_cache_dir()) / "prompts"
    tokenizer_dir = Path(tokenizer_dir)
    if not tokenizer_dir.is_dir():
        raise UsageError(
            "is not a folder",
            flag=f"--rl-hf-checkpoint {tokenizer_dir}",
            remedy="give the one of the checkpoint",
        )
    table = tokenised_table(source, tokenizer_dir, folder, flag=flag, write_cache=write_cache)
    prompts = PromptDataset(table, source.max_prompt_tokens)
    if len(prompts) == 0:
        raise UsageError(
            f"drops every prompt of {flag} {source.path}, the shortest of which has "
            f"{prompts.min_tokens} "
            f"tokens{' or more' if table.column('is_cut').to_numpy().all() else ''}",
            flag=f"--rl-max-prompt-tokens {source.max_prompt_tokens}",
            remedy="raise it to at least that",
        )
    vocabulary = vocabulary_size(tokenizer_dir)
    if vocabulary is not None and (beyond := prompts.beyond(vocabulary)) is not None:
        raise UsageError(
            f": its tokenizer writes token {beyond[1]} in prompt {beyond[0] + 1} of {flag} "
            f"{source.path}, and config.json has a vocab_size of {vocabulary}",
            flag=f"--rl-hf-checkpoint {tokenizer_dir}",
            remedy="copy the tokenizer that belongs to these weights, or resize the model's "
            "embedding",
        )
    if prompts.num_too_long:
        logger.warning(
            "%s %s: %d of %d prompts are longer than %d tokens and left out",
            flag,
            source.path,
            prompts.num_too_long,
            table.num_rows,
            source.max_prompt_tokens,
        )
    for name, (count, first) in prompts.left_out.items():
        logger.warning(
            "%s %s: the model is not given %s, in %d rows (row %d is the first)",
            flag,
            source.path,
            name,
            count,
            first + 1,
        )
    return prompts


def prompt_indices_for_step(num_rows: int, *, step: int, num_prompts: int, seed: int) -> np.ndarray:
    """Positions, `[num_prompts]` int64, of the prompts that step `step` (from 0) draws.

    A function of its arguments alone, so that a resumed run needs no state and every rank draws the
    same. Every `num_rows` draws from the start visit each row once, in an order given by
    (seed, epoch). A step may lie across the end of an epoch.
    """
    if num_rows < 1 or num_prompts < 1 or step < 0 or seed < 0:
        raise ValueError(f"cannot draw: {num_rows=}, {num_prompts=}, {step=}, {seed=}")
    return prompt_indices(num_rows, start=step * num_prompts, count=num_prompts, seed=seed)


def prompt_indices(num_rows: int, *, start: int, count: int, seed: int) -> np.ndarray:
    """Positions, `[count]` int64, of draws number `start` and on; see `prompt_indices_for_step`."""
    stop = start + count
    pieces = []
    while start < stop:
        epoch, position = divmod(start, num_rows)
        pieces.append(_permutation(num_rows, seed, epoch)[position:][: stop - start])
        start += len(pieces[-1])
    return np.concatenate(pieces)


@lru_cache(maxsize=4)  # this epoch and the next, for training and for evaluation
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    # Sorts raw bits: numpy keeps those of a bit generator for ever, but not `permutation`'s.
    raw = PCG64(SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(raw)  # 64 bits are as good as never equal, so any kind of sort agrees


def _counted(left_out: pa.ChunkedArray) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    lengths = left_out.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(lengths):
        for name in left_out[int(row)].as_py():
            count, first = found.get(name, (0, int(row)))
            found[name] = (count + 1, first)
    return found


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "mcore_rl"
