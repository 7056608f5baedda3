"""Dataset of prompts: read by `prompt_file`, tokenised once, mapped into memory from a cache.

file -> checked rows -> chat template -> tokens -> Arrow IPC file, mapped by all processes of a node

See `prompt_cache` for the cache's content and when it is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.random import PCG64, SeedSequence

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.data.apportionment import Apportionment
from mcore_rl.data.assistant_turns import NO_END
from mcore_rl.data.chat import ADDED_END
from mcore_rl.data.demonstration_rows import Responses
from mcore_rl.data.messages import RejectedRow, checked_kwargs
from mcore_rl.data.options import SKIP, DataOptions
from mcore_rl.data.prompt_cache import tokenised_table
from mcore_rl.data.prompt_file import PromptSource, check_path
from mcore_rl.data.row_notes import (
    BadRows,
    as_learned,
    bad_rows_of,
    counted,
    lines_of,
)
from mcore_rl.data.source_position import Begin, fingerprint_of, is_of_sources
from mcore_rl.data.sources import EVAL_PROMPTS, PROMPTS, SourceSpec
from mcore_rl.data.tokenizer import HOW_TO_END, vocabulary_size
from mcore_rl.data.tokenizer_process import ChatTemplate
from mcore_rl.data.user_prompts import default_cache_dir, prompts_path

logger = logging.getLogger(__name__)

_PROMPT_COLUMNS = ("text", "answer", "token_ids", "row")
# Prefixes of a fingerprint of the tokens, by what a run draws.
_PROMPTS, DEMONSTRATIONS, PAIRS = "tokens:", "demonstrations:", "pairs:"
_MOST_TOKENS = (1 << 31) - 1
_FIRST_ROWS = 1000  # in which a row to show is searched
# What to do if the model does not get something.
_WHEN_LEFT_OUT = {
    NO_END: f"give --rl-sft-append-end, or {HOW_TO_END}",
    ADDED_END: "nothing needs to be done, as a response follows a prompt",
}
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
        self._table = table
        self._columns = [table.column(name) for name in _PROMPT_COLUMNS]
        is_bad = table.column("problem").is_valid().to_numpy()
        is_short = num_tokens <= max_prompt_tokens
        self.rows = np.flatnonzero(is_short & ~is_bad)
        """`[prompts]` int64: row in the file of each prompt."""
        self.num_rows = table.num_rows  # of the file
        self.num_too_long = int((~is_short & ~is_bad).sum())
        self.min_tokens = int(num_tokens[~is_bad].min(initial=_MOST_TOKENS))
        self.problems = dict(_entries(table.column("problem"), np.flatnonzero(is_bad)))
        """Rows of the file that are skipped, with what is wrong."""
        self._max_token_ids = table.column("max_token_id").to_numpy()
        self.left_out = counted(table.column("left_out"))
        """Omitted fields: name -> number of rows of the file, and the first of them (from 0)."""
        digests = table.column("digest").take(pa.array(self.rows)).to_pylist()
        content = hashlib.sha256(b"".join([self.rows.tobytes(), *digests]))
        self.fingerprint = self.kind + content.hexdigest()
        """Digest of the prompts with their tokens; equal for the same prompts."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bad_rows(self) -> list[BadRows]:
        """The rows that are skipped, by reason."""
        return bad_rows_of(list(self.problems.values()), list(self.problems))

    def examples(self) -> list[tuple[int, list[list[str]]]]:
        """Return the first row whose texts are stored, from 0, with the parts of each of its
        samples as `row_notes.as_learned` takes them; nothing if there is none."""
        column = self._table.column("shown")
        for row in self.rows[:_FIRST_ROWS].tolist():
            if shown := column[row].as_py():
                return [(row, [json.loads(shown)])]
        return []

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
        return fingerprint == self.fingerprint if _is_known(fingerprint) else None

    def follow(self, fingerprint: str) -> bool:
        """Return whether a checkpoint with `fingerprint` has drawn something else than prompts, or
        than what these are: the run begins with these after, for example, demonstrations."""
        return _is_known(fingerprint) and not fingerprint.startswith(self.kind)

    def __getitem__(self, position: int) -> Prompt:
        row = int(self.rows[position])
        text, answer, token_ids, columns = (column[row] for column in self._columns)
        # A copy, because torch needs writable memory.
        ids = token_ids.values.to_numpy().copy()
        return Prompt(row, text.as_py(), json.loads(answer.as_py()), ids, columns.as_py())


def example_lines(rows: PromptDataset) -> Iterator[str]:
    """Describe the first row as it is learned, one line for each of its samples."""
    for row, samples in rows.examples():
        for number, parts in enumerate(samples):
            which = ("chosen, ", "rejected, ")[number] if len(samples) > 1 else ""
            what = "learned in « »" if len(parts) > 1 else "as the model reads it"
            yield f"row {row + 1}, {which}{what}: {as_learned(parts)}"


def log_examples(rows: PromptDataset, *, flag: str = "--rl-prompts") -> None:
    """Log the first row of a file as it is learned."""
    for line in example_lines(rows):
        logger.info("[Data] %s, %s", flag, line)


class PromptSources:
    """Prompts of one or several sources, one after the other in the order of the flag.

    `Prompt.index` is the row in the file, plus the rows of the sources before. Draws alternate
    between sources by their shares (`apportionment`), and each source visits its prompts once per
    epoch, in an order of its own.
    """

    may_continue = True  # where a run was, with other sources: --rl-on-changed-prompts continue

    def __init__(
        self,
        parts: Sequence[tuple[SourceSpec, PromptDataset]],
        *,
        per_step: int = 1,
        begin: Begin | None = None,
    ) -> None:
        """`per_step` prompts of all sources are a block of the apportionment."""
        self.begin = begin = begin or Begin()
        self.specs = tuple(spec for spec, _ in parts)
        self.parts = tuple(prompts for _, prompts in parts)
        sizes = [len(each) for each in self.parts]
        self._ends = np.cumsum(sizes)
        self._first_rows = np.cumsum([0, *(each.num_rows for each in self.parts)])
        self.num_rows = int(self._first_rows[-1])
        shifted = zip(self._first_rows[:-1], self.parts, strict=True)
        self.rows = np.concatenate([first + each.rows for first, each in shifted])
        """`[prompts]` int64: `Prompt.index` of each prompt."""
        weights = [spec.weight for spec in self.specs]
        self.apportionment = Apportionment(
            [size if each is None else each for size, each in zip(sizes, weights, strict=True)],
            per_step,
            position=begin.position,
            counts=[begin.counts.get(name, 0) for name in self._keys],
        )
        self._streams = [
            () if name == begin.only_source else (crc32(name.encode()),) for name in self._keys
        ]

    def begun(self, begin: Begin) -> PromptSources:
        """Return these sources as a run draws from them that began to do so at `begin`."""
        parts = list(zip(self.specs, self.parts, strict=True))
        return PromptSources(parts, per_step=self.apportionment.block, begin=begin)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Prompt:
        source = int(np.searchsorted(self._ends, position, side="right"))
        part, spec = self.parts[source], self.specs[source]
        prompt = part[position - int(self._ends[source]) + len(part)]
        return replace(
            prompt,
            index=prompt.index + int(self._first_rows[source]),
            source=spec.key,
            max_response_tokens=spec.max_response_tokens,
            num_samples=spec.samples_per_prompt,
        )

    @property
    def most_samples(self) -> int:
        """The largest number of samples per prompt that a source has of its own; 0: none has."""
        return max(spec.samples_per_prompt or 0 for spec in self.specs)

    def samples_of(self, start: int, count: int, num_samples: int) -> tuple[int, ...]:
        """Return the samples of each of `count` draws from `start`; `num_samples` where a source
        does not say."""
        sources, _ = self.apportionment.of_draws(start, count)
        return tuple(self.specs[source].samples_per_prompt or num_samples for source in sources)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources; empty for a single one, whose metrics are the run's."""
        return tuple(spec.name for spec in self.specs) if len(self.specs) > 1 else ()

    @property
    def _keys(self) -> tuple[str, ...]:
        return self.names or ("",)

    @property
    def fingerprint(self) -> str:
        """See `drawn`."""
        if len(self.parts) == 1:
            return self.parts[0].fingerprint
        contents = [each.fingerprint for each in self.parts]
        return fingerprint_of(
            dict(zip(self.names, self.apportionment.units, strict=True)),
            dict(zip(self.names, contents, strict=True)),
            self.apportionment.block,
        )

    def are_those_of(self, fingerprint: str) -> bool | None:
        """Return whether a checkpoint with `fingerprint` has drawn from these sources, in these
        shares. None: see `PromptDataset.are_those_of`."""
        return fingerprint == self.fingerprint if _is_known(fingerprint) else None

    def follow(self, fingerprint: str) -> bool:
        """Return whether a checkpoint with `fingerprint` has drawn something else than prompts."""
        return fingerprint.startswith((DEMONSTRATIONS, PAIRS))

    def sources_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of the sources, int64, of prompts with these `Prompt.index`."""
        return np.searchsorted(self._first_rows, rows, side="right") - 1

    def keys_of(self, rows: np.ndarray) -> list[str]:
        """Return the `SourceSpec.key` of prompts with these `Prompt.index`."""
        return [self.specs[number].key for number in self.sources_of(rows).tolist()]

    def first_of_each(self, count: int) -> np.ndarray:
        """Return the positions, int64, of the first `count` prompts of each source."""
        sizes = [len(each) for each in self.parts]
        firsts = self._ends - sizes
        pieces = zip(firsts.tolist(), sizes, strict=True)
        return np.concatenate([np.arange(first, first + min(n, count)) for first, n in pieces])

    def in_source(self, source: int, start: int, count: int, *, seed: int) -> np.ndarray:
        """Return the positions, `[count]` int64, that draws of one source get, of which `start`
        came before."""
        size, stream = len(self.parts[source]), self._streams[source]
        positions = prompt_indices(size, start=start, count=count, seed=seed, stream=stream)
        return positions + int(self._ends[source]) - size

    def indices(self, start: int, count: int, *, seed: int) -> np.ndarray:
        """Return positions, `[count]` int64, of the prompts that draws from `start` get; depends
        only on the arguments."""
        sources, ranks = self.apportionment.of_draws(start, count)
        positions = np.empty(count, dtype=np.int64)
        for source in np.unique(sources).tolist():
            chosen = sources == source
            first, number = int(ranks[chosen][0]), int(chosen.sum())
            positions[chosen] = self.in_source(source, first, number, seed=seed)
        return positions

    def of_draw(self, draw: int, *, seed: int) -> Prompt:
        """Return the prompt of one of a run's draws."""
        return self[int(self.indices(draw, 1, seed=seed)[0])]


P = TypeVar("P", bound=PromptDataset)


def chat_template(options: DataOptions, date: str | None = None) -> ChatTemplate:
    """Return the chat template of the flags; `date` as in `ChatTemplate`. Raises UsageError."""
    flag = f"--rl-chat-template-kwargs {options.chat_template_kwargs}"
    try:
        kwargs = checked_kwargs(options.chat_template_kwargs, "it")
    except RejectedRow as error:
        raise UsageError(f": {error.problem}", flag=flag, remedy=error.remedy) from error
    return ChatTemplate(options.chat_template, kwargs, date)


def prompt_source(
    options: DataOptions,
    spec: SourceSpec,
    *,
    trust_remote_code: bool = False,
    date: str | None = None,
    responses: Responses | None = None,
    max_response_tokens: int = 0,
    flag: str | None = None,
) -> PromptSource:
    """Return how to read the prompts of a source: a file, or a function of --rl-import; with
    `responses` of demonstrations, which share both limits. `flag` is what names them, if it is
    another one than those of prompts."""
    flag = flag or (EVAL_PROMPTS if spec.is_eval else PROMPTS)
    if spec.system_prompt is not None and options.no_chat_template:
        raise UsageError(
            f"cannot be combined with the system_prompt of source '{spec.name}' in {flag}, which "
            "only a chat template can write",
            flag="--rl-no-chat-template",
            remedy="drop one of the two",
        )
    return PromptSource(
        path=prompts_path(spec.path, options.cache_dir, flag),
        prompt_column=spec.prompt_column or options.prompt_column,
        answer_column=spec.answer_column or options.answer_column,
        use_chat_template=not options.no_chat_template,
        max_prompt_tokens=(spec.max_prompt_tokens or options.max_prompt_tokens)
        + max_response_tokens,
        trust_remote_code=trust_remote_code,
        template=chat_template(options, date),
        system_prompt=spec.system_prompt,
        flag=flag,
        responses=responses,
        skips_bad_rows=options.bad_rows == SKIP,
    )


def load_prompt_files(
    options: DataOptions,
    tokenizer_dir: Path | str,
    *,
    per_step: int = 1,
    trust_remote_code: bool = False,
    date: str | None = None,
    write_cache: bool = True,
) -> tuple[PromptSources, PromptSources | None]:
    """Return training and held-out prompts, from the cache if they were tokenised before.

    `per_step` is the number of training prompts in a step, `trust_remote_code` Megatron's
    --trust-remote-code, `date` the date (ISO) for chat templates; None: today. `write_cache` as in
    `load_prompts`.
    """

    def load(specs: Sequence[SourceSpec], per_step: int = 1) -> PromptSources:
        sources = (
            prompt_source(options, spec, trust_remote_code=trust_remote_code, date=date)
            for spec in specs
        )
        loaded = [
            load_prompts(each, tokenizer_dir, cache_dir=options.cache_dir, write_cache=write_cache)
            for each in sources
        ]
        return PromptSources(list(zip(specs, loaded, strict=True)), per_step=per_step)

    train, held_out = options.train_sources(), options.eval_sources()
    return load(train, per_step), load(held_out) if held_out else None


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
    if len(prompts.problems) == prompts.num_rows:
        raise UsageError(
            f"has no row that can be used: {prompts.bad_rows[0]}",
            flag=source.given,
            remedy="correct the file, or the flags of its columns",
        )
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


def log_bad_rows(rows: PromptDataset, given: str) -> None:
    """Log the rows that are skipped, by reason; `given` is the flag with its value."""
    for line in lines_of(rows.bad_rows, rows.num_rows):
        logger.warning("%s: %s; correct the file, or train without them", given, line)


def _log_omissions(prompts: PromptDataset, source: PromptSource, num_rows: int) -> None:
    if source.responses is None or source.responses.other is None:
        log_bad_rows(prompts, source.given)
    if prompts.num_too_long:
        logger.warning(
            "%s: %d of %d prompts are longer than %d tokens and left out; raise %s or remove them",
            source.given,
            prompts.num_too_long,
            num_rows,
            source.max_prompt_tokens,
            source.limit,
        )
    for name, (count, first) in prompts.left_out.items():
        logger.warning(
            "%s: the model does not get %s, in %d rows (the first is row %d); %s",
            source.given,
            name,
            count,
            first + 1,
            _WHEN_LEFT_OUT.get(name, "remove it, or use another --rl-chat-template"),
        )


def prompt_indices(
    num_rows: int, *, start: int, count: int, seed: int, stream: tuple[int, ...] = ()
) -> np.ndarray:
    """Return positions, `[count]` int64, of the prompts that draws from `start` get.

    The result depends only on the arguments, so a resumed run needs no state and every rank draws
    the same. Every `num_rows` draws from 0 visit each row once, in an order given by (seed, epoch,
    stream).
    """
    stop = start + count
    pieces = []
    while start < stop:
        epoch, position = divmod(start, num_rows)
        pieces.append(_permutation(num_rows, seed, epoch, stream)[position:][: stop - start])
        start += len(pieces[-1])
    return np.concatenate(pieces)


@lru_cache(maxsize=32)  # this epoch and the next of each source
def _permutation(num_rows: int, seed: int, epoch: int, stream: tuple[int, ...]) -> np.ndarray:
    # Sort raw bits: numpy guarantees a bit generator's bits across versions, not `permutation`.
    raw = PCG64(SeedSequence([seed, epoch, *stream])).random_raw(num_rows)
    return np.argsort(raw)  # 64 bits are practically never equal, so every sort agrees


def _is_known(fingerprint: str) -> bool:
    """Return whether a fingerprint is of this version, and not of a file."""
    return fingerprint.startswith(_KINDS) or is_of_sources(fingerprint)


def _entries(column: pa.ChunkedArray, rows: np.ndarray) -> Iterator[tuple[int, str]]:
    for row in rows.tolist():
        yield row, column[row].as_py()
