"""Prompts: read from JSON Lines or Parquet, tokenised once, then mapped into memory from a cache.

file -> checked rows -> chat template -> tokens -> Arrow IPC file, mapped by all processes of a node

The cache holds every row of the file, so that `max_prompt_tokens` only selects from it. Its name is
a hash of all that decides its content: the file's bytes, the tokenizer's files (and its code, where
that is run), the columns, the template switch, the tokenizer libraries' versions and `_FORMAT`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock
from numpy.random import PCG64, SeedSequence

from mcore_rl.errors import UsageError
from mcore_rl.known_to_transformers import register_families
from mcore_rl.types import Prompt

logger = logging.getLogger(__name__)

_FORMAT = 1
_ROWS_PER_BATCH = 4096
_SCHEMA = pa.schema(
    {
        "text": pa.large_string(),
        "answer": pa.large_string(),
        "token_ids": pa.large_list(pa.int32()),
        "num_tokens": pa.int32(),
    }
)
_JSON_SUFFIXES = (".jsonl", ".json")
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A file of prompts and how it is read.

    `prompt_column` holds a string or a list of {role, content} messages; `answer_column` a string,
    an integer or a finite float, which becomes a string. With `use_chat_template` a string is one
    user message; without it, it goes to the model as it stands. Longer prompts than
    `max_prompt_tokens` are dropped. `trust_remote_code` lets the checkpoint's folder bring code of
    its own for its tokenizer, which then runs.
    """

    path: Path
    max_prompt_tokens: int
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    use_chat_template: bool = True
    trust_remote_code: bool = False


class _Row(NamedTuple):
    """A checked row. `place` says where it stands, for messages: "line 3"."""

    place: str
    prompt: str | list[dict[str, str]]
    answer: str

    @property
    def text(self) -> str:
        """What `Prompt.text` is: the column's string, or the messages' contents in turn."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message["content"] for message in self.prompt)


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
        self._columns = [table.column(name) for name in ("text", "answer", "token_ids")]
        self._rows = np.flatnonzero(num_tokens <= max_prompt_tokens)
        self.num_too_long = table.num_rows - len(self._rows)
        self.min_tokens = int(num_tokens.min())
        self.fingerprint = _sha256_of(content_key, max_prompt_tokens)
        """sha256 of the rows, their tokens and the limit; equal means the same prompts."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Prompt:
        row = int(self._rows[position])
        text, answer, token_ids = (column[row] for column in self._columns)
        # A copy, because torch wants memory that may be written to.
        return Prompt(row, text.as_py(), answer.as_py(), token_ids.values.to_numpy().copy())


def check_prompts(source: PromptSource, flag: str = "--rl-prompts") -> int:
    """Reads the whole file without a tokenizer; returns its number of rows.

    Not collective. Raises UsageError for a file that is missing, empty, of another suffix or
    unreadable, for a broken line (with its number), a missing column and a value of a wrong type.
    """
    return sum(1 for _ in _read_rows(source, flag))


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
    a tokenizer without the chat template asked for, and a limit that no prompt meets.
    """
    _check_path(source, flag)
    folder = (Path(cache_dir) if cache_dir is not None else _default_cache_dir()) / "prompts"
    tokenizer_dir = Path(tokenizer_dir)
    if not tokenizer_dir.is_dir():
        raise UsageError(
            f"--rl-hf-checkpoint {tokenizer_dir} is not a folder; give the one of the checkpoint"
        )
    content_key = _content_key(source, tokenizer_dir)
    path = folder / f"{content_key}.arrow"
    table = _map_table(path)
    if table is None and write_cache:
        table = _tokenise_once(source, tokenizer_dir, path, flag)
    elif table is None:
        table = _tokenise_aside(source, tokenizer_dir, flag)
    prompts = PromptDataset(table, source.max_prompt_tokens, content_key)
    if len(prompts) == 0:
        raise UsageError(
            f"--rl-max-prompt-tokens {source.max_prompt_tokens} drops every prompt of {flag} "
            f"{source.path}, the shortest of which has {prompts.min_tokens} tokens; raise it to "
            "at least that"
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


# Reading ------------------------------------------------------------------------------------------


def _check_path(source: PromptSource, flag: str) -> None:
    path = source.path
    if path.suffix not in (*_JSON_SUFFIXES, ".parquet"):
        raise UsageError(
            f"{flag} {path} has the suffix {path.suffix!r}, but .jsonl or .json (one JSON object a "
            "line) or .parquet is needed; convert or rename it"
        )
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise UsageError(f"{flag} {path} {state}; give a .jsonl or .parquet file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{flag} {path} cannot be read; give yourself the permission (chmod)")
    if path.stat().st_size == 0:
        raise UsageError(f"{flag} {path} is empty; write one prompt a line")


def _read_rows(source: PromptSource, flag: str) -> Iterator[_Row]:
    _check_path(source, flag)
    read = _read_parquet if source.path.suffix == ".parquet" else _read_json_lines
    place = None
    for place, fields in read(source, flag):
        for column, column_flag in (
            (source.prompt_column, "--rl-prompt-column"),
            (source.answer_column, "--rl-answer-column"),
        ):
            if column not in fields:
                raise UsageError(
                    f"{column_flag} {column!r} names a column that {flag} {source.path} lacks in "
                    f"{place}, which has {', '.join(map(repr, fields)) or 'no columns'}; name one "
                    "that all rows have"
                )
        yield _Row(
            place,
            _checked_prompt(fields[source.prompt_column], source, flag, place),
            _checked_answer(fields[source.answer_column], source, flag, place),
        )
    if place is None:
        raise UsageError(f"{flag} {source.path} holds no rows; write one prompt a line")


def _read_json_lines(source: PromptSource, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:  # of the JSON and of the UTF-8
                raise UsageError(
                    f"{flag} {source.path}, {place}, is not valid JSON ({error}); each line must "
                    "be one JSON object in UTF-8"
                ) from error
            if b"\\ud" in line.lower() and not _is_unicode(fields):
                _refuse(source, flag, place, "holds half a surrogate pair", "write whole ones")
            if not isinstance(fields, dict):
                _refuse(source, flag, place, "is no JSON object", "write {...} with the columns")
            yield place, fields


def _is_unicode(fields: Any) -> bool:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(source: PromptSource, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(source.path, memory_map=True) as file:
            wanted = {source.prompt_column, source.answer_column}
            present = file.schema_arrow.names
            if not wanted.issubset(present):
                yield "its schema", dict.fromkeys(present)
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=sorted(wanted)):
                for fields in batch.to_pylist():
                    number += 1
                    yield f"row {number}", fields
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UsageError(
            f"{flag} {source.path} cannot be read as Parquet ({error}); write it again"
        ) from error


def _checked_prompt(
    value: Any, source: PromptSource, flag: str, place: str
) -> str | list[dict[str, str]]:
    column = f"column {source.prompt_column!r} is"
    if isinstance(value, str):
        if not value.strip():
            _refuse(source, flag, place, f"{column} blank", "write a prompt or remove the row")
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        _refuse(
            source,
            flag,
            place,
            f"{column} {_kind(value)}",
            "write a string or a list of {role, content} messages, all strings",
        )
    if not source.use_chat_template:
        _refuse(
            source,
            flag,
            place,
            f"{column} a list of messages, which need the chat template",
            "leave out --rl-no-chat-template or write a string",
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _checked_answer(value: Any, source: PromptSource, flag: str, place: str) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and math.isfinite(value)):
        return str(value)
    column = f"column {source.answer_column!r} is {_kind(value)}"
    _refuse(source, flag, place, column, "write a string, an integer or a finite number")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, float):
        return "null" if value is None else repr(value)
    return f"of type {type(value).__name__} ({repr(value)[:60]})"


def _refuse(source: PromptSource, flag: str, place: str, problem: str, remedy: str) -> NoReturn:
    raise UsageError(f"{flag} {source.path}, {place}: {problem}; {remedy}")


# Tokenising ---------------------------------------------------------------------------------------


def _tokenise_once(source: PromptSource, tokenizer_dir: Path, path: Path, flag: str) -> pa.Table:
    """Writes the cache file unless another process of this node just did; returns it mapped."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            table = _map_table(path)
            if table is None:
                _write_table(source, tokenizer_dir, path, flag)
                table = _map_table(path)
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
        return _readable(_map_table(path), path)  # stays mapped when the folder goes


def _readable(table: pa.Table | None, path: Path) -> pa.Table:
    if table is None:
        raise RuntimeError(f"the prompt cache {path} cannot be read right after it was written")
    return table


def _map_table(path: Path) -> pa.Table | None:
    """None if there is no such file, or none that is whole."""
    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (pa.ArrowInvalid, OSError):
        return None


def _write_table(source: PromptSource, tokenizer_dir: Path, path: Path, flag: str) -> None:
    """Tokenises the file; the result appears at `path` whole or not at all."""
    tokenizer = _load_tokenizer(source, tokenizer_dir)
    unfinished = path.with_name(f"{uuid.uuid4().hex}.tmp")  # other nodes may be writing theirs
    try:
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
            rows = _read_rows(source, flag)
            while batch := list(islice(rows, _ROWS_PER_BATCH)):
                writer.write_batch(_tokenised(batch, tokenizer, source, flag))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _tokenised(rows: list[_Row], tokenizer: Any, source: PromptSource, flag: str) -> pa.RecordBatch:
    if source.use_chat_template:
        texts = [_rendered(row, tokenizer, source, flag) for row in rows]
    else:
        texts = [row.text for row in rows]
    # A chat template writes its own special tokens.
    encoded = tokenizer(texts, add_special_tokens=not source.use_chat_template)["input_ids"]
    columns = [
        [row.text for row in rows],
        [row.answer for row in rows],
        encoded,
        [len(token_ids) for token_ids in encoded],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)


def _rendered(row: _Row, tokenizer: Any, source: PromptSource, flag: str) -> str:
    from jinja2 import TemplateError

    messages = row.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UsageError(
            f"{flag} {source.path}, {row.place}: the chat template refuses the messages ({error}); "
            "correct the row or pass --rl-no-chat-template"
        ) from error


def _load_tokenizer(source: PromptSource, tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    register_families()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(tokenizer_dir),
            local_files_only=True,
            # Said aloud: transformers would ask on stdin, and take a y that lies there.
            trust_remote_code=source.trust_remote_code,
        )
    except Exception as error:  # `tokenizers` raises nothing more special for a broken file
        if not source.trust_remote_code and _brings_code(tokenizer_dir):
            raise UsageError(
                f"--rl-hf-checkpoint {tokenizer_dir} holds a tokenizer with code of its own, which "
                "is not run unasked; read it, and give --trust-remote-code to have it run"
            ) from error
        raise UsageError(
            f"--rl-hf-checkpoint {tokenizer_dir} holds no tokenizer that transformers can load "
            f"({str(error).partition(chr(10))[0]}); add its tokenizer files, as tokenizer.json"
        ) from error
    if source.use_chat_template and tokenizer.chat_template is None:
        raise UsageError(
            f"--rl-hf-checkpoint {tokenizer_dir} has a tokenizer without a chat template; pass "
            "--rl-no-chat-template to give prompts to the model as they stand"
        )
    return tokenizer


def _runs_code(source: PromptSource, tokenizer_dir: Path) -> bool:
    return source.trust_remote_code and _brings_code(tokenizer_dir)


def _brings_code(tokenizer_dir: Path) -> bool:
    """Whether the folder names a class of its own for its tokenizer."""
    for name in ("tokenizer_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            settings = json.loads((tokenizer_dir / name).read_text(encoding="utf-8"))
            return "AutoTokenizer" in settings["auto_map"]
    return False


# The cache's name ---------------------------------------------------------------------------------


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "mcore_rl"


def _content_key(source: PromptSource, tokenizer_dir: Path) -> str:
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
        *(_tokenizer_hashes(tokenizer_dir, (".py",)) if _runs_code(source, tokenizer_dir) else ()),
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
