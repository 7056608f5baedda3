"""Demonstrations and pairs of a file, tokenised once: what supervised training draws instead of
prompts. Every process maps all of them, so no tokens travel between ranks.

A row with several samples, a pair, is one draw.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mcore_rl.batching.table import SampleTokens
from mcore_rl.common.errors import UsageError
from mcore_rl.data.demonstration_rows import Responses
from mcore_rl.data.options import DataOptions, SupervisedOptions
from mcore_rl.data.prompts import (
    DEMONSTRATIONS,
    PAIRS,
    PromptDataset,
    PromptSources,
    load_rows,
    log_bad_rows,
    prompt_source,
)
from mcore_rl.data.source_position import Begin
from mcore_rl.data.sources import EVAL_PROMPTS, PROMPTS, source_of_rows

logger = logging.getLogger(__name__)

CHOSEN, REJECTED = "chosen", "rejected"  # columns of pairs


class Demonstrations(PromptDataset):
    """One conversation per row."""

    kind = DEMONSTRATIONS
    samples_per_row = 1
    # Of `PromptSources`: there is one source.
    begin = Begin()
    may_continue = False

    def __init__(self, table: pa.Table, max_tokens: int) -> None:
        super().__init__(table, max_tokens)
        self.table, self.max_tokens = table, max_tokens
        self._token_ids, self._spans = (table.column(name) for name in ("token_ids", "spans"))

    def begun(self, begin: Begin) -> Demonstrations:
        """Return the same rows: they begin with the first."""
        return self

    def lengths(self, position: int) -> list[tuple[int, int]]:
        """Return, per sample of the row, the tokens before the first to learn, and all others."""
        row = int(self.rows[position])
        num_tokens, first = len(self._token_ids[row]), self._spans[row][0].as_py()
        return [(first, num_tokens - first)]

    def num_learned(self, position: int) -> list[int]:
        """Return the number of tokens to learn of each sample of the row."""
        spans = self._spans[int(self.rows[position])].values.to_numpy().reshape(-1, 2)
        return [int((spans[:, 1] - spans[:, 0]).sum())]

    def tokens(self, position: int, sample: int = 0) -> SampleTokens:
        """Return the tokens of one of the row's samples; those to learn are `is_generated`."""
        row = int(self.rows[position])
        ids = self._token_ids[row].values.to_numpy().copy()  # torch needs writable memory
        is_learned = np.zeros(len(ids), dtype=np.bool_)
        spans = self._spans[row].values.to_numpy().reshape(-1, 2)
        for begin, end in spans.tolist():
            is_learned[begin:end] = True
        return SampleTokens(ids, is_learned, np.zeros(len(ids), dtype=np.float32))


class Pairs(Demonstrations):
    """The preferred response to a prompt and another one: two conversations per row."""

    kind = PAIRS
    samples_per_row = 2

    def __init__(self, chosen: Demonstrations, rejected: Demonstrations) -> None:
        """`chosen` and `rejected` are of the same file; rows of which both fit are kept."""
        super().__init__(chosen.table, chosen.max_tokens)
        self.rows, _, self._places = np.intersect1d(chosen.rows, rejected.rows, return_indices=True)
        self._rejected = rejected
        self.problems = rejected.problems | chosen.problems
        self.left_out = rejected.left_out | chosen.left_out
        content = f"{chosen.fingerprint} {rejected.fingerprint}".encode()
        self.fingerprint = PAIRS + hashlib.sha256(content).hexdigest()

    def lengths(self, position: int) -> list[tuple[int, int]]:
        return super().lengths(position) + self._rejected.lengths(int(self._places[position]))

    def num_learned(self, position: int) -> list[int]:
        return super().num_learned(position) + self._rejected.num_learned(
            int(self._places[position])
        )

    def examples(self) -> list[tuple[int, list[list[str]]]]:
        chosen, rejected = dict(super().examples()), dict(self._rejected.examples())
        return [(row, [*chosen[row], *rejected[row]]) for row in chosen if row in rejected]

    def tokens(self, position: int, sample: int = 0) -> SampleTokens:
        if sample:
            return self._rejected.tokens(int(self._places[position]))
        return super().tokens(position)


Drawn = PromptSources | Demonstrations  # what a run draws from


def load_demonstrations(
    path: str,
    flag: str,
    tokenizer_dir: Path | str,
    data: DataOptions,
    options: SupervisedOptions,
    *,
    max_response_tokens: int,
    responses: Responses | None = None,
    trust_remote_code: bool = False,
    date: str | None = None,
    write_cache: bool = True,
) -> Demonstrations:
    """Return the demonstrations of the file that `flag` names, as `load_prompts`. They may have
    --rl-max-prompt-tokens and `max_response_tokens` together."""
    source = prompt_source(
        data,
        source_of_rows(path, flag),
        flag=flag,
        trust_remote_code=trust_remote_code,
        date=date,
        responses=responses
        or Responses(options.response_column, options.loss_on, append_end=options.append_end),
        max_response_tokens=max_response_tokens,
    )
    return load_rows(
        *(source, tokenizer_dir),
        cache_dir=data.cache_dir,
        write_cache=write_cache,
        make=Demonstrations,
    )


def load_supervised_files(
    trains_on: str,
    tokenizer_dir: Path | str,
    data: DataOptions,
    options: SupervisedOptions,
    **how: Any,
) -> tuple[Demonstrations, Demonstrations | None]:
    """Return the rows of --rl-prompts and --rl-eval-prompts: "demonstrations" or "pairs". `how` are
    keywords of `load_demonstrations`."""
    load: Callable[..., Demonstrations]
    load = load_pairs if trains_on == "pairs" else load_demonstrations
    data.train_sources()  # raises if there are none
    assert data.prompts is not None
    train = load(data.prompts, PROMPTS, tokenizer_dir, data, options, **how)
    if data.eval_prompts is None:
        return train, None
    return train, load(data.eval_prompts, EVAL_PROMPTS, tokenizer_dir, data, options, **how)


def load_pairs(
    path: str,
    flag: str,
    tokenizer_dir: Path | str,
    data: DataOptions,
    options: SupervisedOptions,
    *,
    max_response_tokens: int,
    **how: Any,
) -> Pairs:
    """Return the pairs of the file that `flag` names, with the columns `chosen` and `rejected`; see
    `demonstration_rows`. `how` are further keywords of `load_demonstrations`."""
    chosen, rejected = (
        load_demonstrations(
            *(path, flag, tokenizer_dir, data, options),
            max_response_tokens=max_response_tokens,
            responses=Responses(column, other=other, append_end=options.append_end),
            **how,
        )
        for column, other in ((CHOSEN, REJECTED), (REJECTED, CHOSEN))
    )
    pairs = Pairs(chosen, rejected)
    log_bad_rows(pairs, f"{flag} {path}")
    if not len(pairs):
        raise UsageError(
            "drops the chosen or the rejected response of every pair",
            flag="--rl-max-prompt-tokens plus --rl-max-response-tokens, "
            f"{data.max_prompt_tokens + max_response_tokens},",
            remedy="raise one of them",
        )
    if num_left_out := pairs.table.num_rows - len(pairs):
        logger.warning(
            "%s: %d of %d pairs are left out, because one of their responses or both are too long; "
            "raise --rl-max-response-tokens, or remove them",
            *(path, num_left_out, pairs.table.num_rows),
        )
    return pairs
