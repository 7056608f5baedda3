"""Prompts: read by `prompt_file`, tokenised once, then mapped into memory from a cache.

file -> checked rows -> chat template -> tokens -> Arrow IPC file, mapped by all processes of a node

The cache holds every row of the file, so that `max_prompt_tokens` only selects from it; but of
texts far too long it has no tokens, and is made anew for a limit that they might meet. Its name is
a hash of all that decides its content: the file's bytes, the tokenizer's files (and its code, where
that is run), the columns, the template switch, the tokenizer libraries' versions and `_FORMAT`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock
from numpy.random import PCG64, SeedSequence

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_file import PromptRow, PromptSource, check_path, read_rows
from mcore_rl.data.tokenizer import TooLong, brings_code, load_tokenizer, vocabulary_size

logger = logging.getLogger(__name__)

_FORMAT = 2
_ROWS_PER_BATCH = 4096
_CHARACTERS_PER_BATCH = 1 << 20  # for which a tokenizer takes 200 MB
_SCHEMA = pa.schema(
    {
        "text": pa.large_string(),
        "answer": pa.large_string(),  # JSON
        "row": pa.large_string(),  # JSON
        "token_ids": pa.large_list(pa.int32()),
        "num_tokens": pa.int32(),
        "max_token_id": pa.int32(),
        # Too long for sure: it has no tokens and no text here, and num_tokens or more in the file.
        "is_cut": pa.bool_(),
    }
)
_OF_A_PROMPT = ("text", "answer", "token_ids", "row")
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")


class PromptDataset:
    """The prompts of a file that fit the limit, in file order, mapped into memory.

    `prompts[i]` costs some 10 us and holds nothing but that row. `Prompt.index` is the row in the
    file (blank lines do not count), which differs from `i` once a longer prompt was dropped.
    `Prompt.text` is the column as it stands in the file (messages: their contents, a blank line
    between); `Prompt.token_ids` is what the model gets, chat template and special tokens included.
    """

    def __init__(self, table: pa.Table, max_prompt_tokens: int, content_key: str) -> None:
        """`table` has `_SCHEMA` and one row per row of the file."""
        num_tokens = table.column("num_tokens").to_numpy()
        self._columns = [table.column(name) for name in _OF_A_PROMPT]
        self._rows = np.flatnonzero(num_tokens <= max_prompt_tokens)
        self.num_too_long = table.num_rows - len(self._rows)
        self.min_tokens = int(num_tokens.min())
        self._max_token_ids = table.column("max_token_id").to_numpy()
        self.fingerprint = _sha256_of(content_key, max_prompt_tokens)
        """sha256 of the rows, their tokens and the limit; equal means the same prompts."""

    def __len__(self) -> int:
        return len(self._rows)

    def beyond(self, vocabulary: int) -> tuple[int, int] | None:
        """Row in the file and token of the first prompt with one that is not below `vocabulary`."""
        largest = self._max_token_ids[self._rows]
        for position in np.flatnonzero(largest >= vocabulary)[:1]:
            return int(self._rows[position]), int(largest[position])
        return None

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
    is only read, and that file is taken at once. `transformers` is imported only to tokenise.

    Raises UsageError for all that `check_prompts` raises it for, for a folder without a tokenizer,
    a tokenizer without the chat template asked for, one whose tokens the model does not have, and a
    limit that no prompt meets.
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
    content_key = _content_key(source, tokenizer_dir)
    path = folder / f"{content_key}.arrow"
    table = _map_table(path, source.max_prompt_tokens)
    if table is None and write_cache:
        table = _tokenise_once(source, tokenizer_dir, path, flag)
    elif table is None:
        table = _tokenise_aside(source, tokenizer_dir, flag)
    prompts = PromptDataset(table, source.max_prompt_tokens, content_key)
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


# Tokenising ---------------------------------------------------------------------------------------


def _tokenise_once(source: PromptSource, tokenizer_dir: Path, path: Path, flag: str) -> pa.Table:
    """Writes the cache file unless another process of this node just did; returns it mapped."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            table = _map_table(path, source.max_prompt_tokens)
            if table is None:
                _write_table(source, tokenizer_dir, path, flag)
                table = _map_table(path, source.max_prompt_tokens)
    except OSError as error:
        logger.warning(
            "the cache %s cannot be used (%s); prompts are tokenised into a temporary file, by "
            "each process and at each start",
            path.parent,
            error,
        )
        return _tokenise_aside(source, tokenizer_dir, flag)
    return _readable(table, path)


def _tokenise_aside(source: PromptSource, tokenizer_dir: Path, flag: str) -> pa.Table:
    """The same in a temporary file of this process."""
    with tempfile.TemporaryDirectory(prefix="mcore_rl_") as folder:
        path = Path(folder) / "prompts.arrow"
        _write_table(source, tokenizer_dir, path, flag)
        # Stays mapped when the folder goes.
        return _readable(_map_table(path, source.max_prompt_tokens), path)


def _readable(table: pa.Table | None, path: Path) -> pa.Table:
    if table is None:
        raise RuntimeError(f"the prompt cache {path} cannot be read right after it was written")
    return table


def _map_table(path: Path, max_prompt_tokens: int) -> pa.Table | None:
    """None if there is no such file, or none that is whole and right for that limit."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (pa.ArrowInvalid, OSError):
        return None
    if table.schema != _SCHEMA:
        return None
    is_cut, num_tokens = (table.column(name).to_numpy() for name in ("is_cut", "num_tokens"))
    return None if (num_tokens[is_cut] <= max_prompt_tokens).any() else table


def _write_table(source: PromptSource, tokenizer_dir: Path, path: Path, flag: str) -> None:
    """Tokenises the file; the result appears at `path` whole or not at all."""
    tokenizer = load_tokenizer(
        tokenizer_dir,
        trust_remote_code=source.trust_remote_code,
        needs_template=source.use_chat_template,
    )
    too_long = TooLong(tokenizer, source.max_prompt_tokens)
    unfinished = path.with_name(f"{uuid.uuid4().hex}.tmp")  # other nodes may be writing theirs
    try:
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
            for batch in _batches(read_rows(source, flag)):
                writer.write_batch(_tokenised(batch, tokenizer, too_long, source, flag))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _batches(rows: Iterable[PromptRow]) -> Iterator[list[PromptRow]]:
    """Of so many rows, or so many characters, as are tokenised at one time."""
    batch: list[PromptRow] = []
    characters = 0
    for row in rows:
        characters += len(row.text)
        if batch and (len(batch) == _ROWS_PER_BATCH or characters > _CHARACTERS_PER_BATCH):
            yield batch
            batch, characters = [], len(row.text)
        batch.append(row)
    if batch:
        yield batch


def _tokenised(
    rows: list[PromptRow], tokenizer: Any, too_long: TooLong, source: PromptSource, flag: str
) -> pa.RecordBatch:
    if source.use_chat_template:
        texts = [_rendered(row, tokenizer, source, flag) for row in rows]
    else:
        texts = [row.text for row in rows]
    least = [too_long.least_tokens(text) for text in texts]
    texts = ["" if cut else text for cut, text in zip(least, texts, strict=True)]
    # A chat template writes its own special tokens.
    encoded = tokenizer(texts, add_special_tokens=not source.use_chat_template)["input_ids"]
    encoded = [[] if cut else ids for cut, ids in zip(least, encoded, strict=True)]
    columns = [
        ["" if cut else row.text for cut, row in zip(least, rows, strict=True)],
        ["" if cut else json.dumps(row.answer) for cut, row in zip(least, rows, strict=True)],
        ["" if cut else row.as_json() for cut, row in zip(least, rows, strict=True)],
        encoded,
        [cut or len(token_ids) for cut, token_ids in zip(least, encoded, strict=True)],
        [max(token_ids, default=-1) for token_ids in encoded],
        [bool(cut) for cut in least],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)


def _rendered(row: PromptRow, tokenizer: Any, source: PromptSource, flag: str) -> str:
    from jinja2 import TemplateError

    messages = row.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UsageError(
            f", {row.place}: the chat template refuses the messages ({error})",
            flag=f"{flag} {source.path}",
            remedy="correct the row or pass --rl-no-chat-template",
        ) from error


# The cache's name ---------------------------------------------------------------------------------


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "mcore_rl"


def _content_key(source: PromptSource, tokenizer_dir: Path) -> str:
    trusts_code = source.trust_remote_code and brings_code(tokenizer_dir)
    # Contents rather than times: a copied or touched file is the same, a rewritten one never.
    return _sha256_of(
        _FORMAT,
        _sha256_of_file(source.path),
        source.path.suffix,
        source.prompt_column,
        source.answer_column,
        source.use_chat_template,
        *(importlib.metadata.version(name) for name in ("transformers", "tokenizers")),
        *_tokenizer_hashes(tokenizer_dir, _TOKENIZER_SUFFIXES),
        # Code may tokenise otherwise, and no cache may hide that it is needed.
        *(_tokenizer_hashes(tokenizer_dir, (".py",)) if trusts_code else ()),
    )


def _tokenizer_hashes(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        is_index = path.name.endswith(".index.json")  # of weights; says nothing about tokens
        if path.suffix in suffixes and not is_index and path.is_file():
            yield f"{path.name} {_sha256_of_file(path)}"


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
