"""Cache of tokenised prompts: one Arrow file per prompts file and tokenisation settings.

It holds every row of the file, and `max_prompt_tokens` selects from it. For texts that are far too
long it has no tokens; it is rebuilt for a limit that they might meet. Its name is a hash of
everything that determines its content: the file's bytes, the tokenizer's files (and its code, if it
runs), the columns, the chat template with its arguments, the versions of the libraries that render
and tokenise, and the date if the template may ask for it. Each row has a digest of its results, and
these give a run's fingerprint: results are compared, not inputs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import tempfile
import unicodedata
import uuid
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock
from packaging.utils import canonicalize_name

from mcore_rl.common.errors import UsageError
from mcore_rl.data.messages import RejectedRow
from mcore_rl.data.prompt_file import PromptRow, PromptSource, bad_row, read_rows
from mcore_rl.data.tokenizer import brings_code
from mcore_rl.data.tokenizer_process import (
    ChatTemplate,
    ProcessEnded,
    RowRejected,
    Tokenised,
    TokenizerProcess,
)

logger = logging.getLogger(__name__)

_FORMAT = 9
_ROWS_PER_BATCH = 4096
_CHARACTERS_PER_BATCH = 1 << 20  # a tokenizer takes 200 MB for these
_DIGEST_BYTES = 16
_NUM_SHOWN = 16
SCHEMA = pa.schema(
    {
        "text": pa.large_string(),
        "answer": pa.large_string(),  # JSON
        "row": pa.large_string(),  # JSON
        "token_ids": pa.large_list(pa.int32()),
        "num_tokens": pa.int32(),
        "max_token_id": pa.int32(),
        # Certainly too long: tokens and text are not stored, and num_tokens is a lower bound.
        "is_cut": pa.bool_(),
        "left_out": pa.list_(pa.string()),  # fields that the model does not get
        "spans": pa.list_(pa.int32()),  # of demonstrations: see `assistant_turns.Demonstrated`
        "digest": pa.binary(_DIGEST_BYTES),  # of text, answer, row and tokens
        "problem": pa.large_string(),  # why a skipped row cannot be used, else null
        # Of the first usable rows, else null; JSON: texts before, in and between learned turns.
        "shown": pa.large_string(),
    }
)
# Libraries that render, tokenise or read a tokenizer's files; then those that some tokenizers of
# transformers import (tests/unit/test_prompt_cache.py searches it for others).
LIBRARIES = (
    "transformers tokenizers jinja2 sentencepiece tiktoken protobuf mistral_common regex "
    "emoji fugashi g2p_en ipadic kytea nltk phonemizer pythainlp rhoknp rjieba sacremoses "
    "sudachipy unidic unidic_lite uroman"
).split()
_WEIGHTS = frozenset(
    ".safetensors .pt .pth .gguf .h5 .msgpack .onnx .ot .npz .ckpt .distcp .md .png .jpg .pdf "
    ".pyc".split()
)
_WEIGHTS_OF_TORCH = ("pytorch_model", "adapter_model", "model", "optimizer", "consolidated")
_MAY_HOLD_TEMPLATES = ("tokenizer_config.json", "chat_template.json")
_ASKS_FOR_DATE = b"strftime_now"
_NOTHING = Tokenised([], 0, [])


def tokenizer_process(
    folder: Path, template: ChatTemplate, *, use_template: bool, trust_remote_code: bool
) -> TokenizerProcess:
    """Return the process for a folder's tokenizer in the current version of its files.

    Raises UsageError for a template file that cannot be read."""
    hashes = list(_tokenizer_hashes(folder, runs_code=trust_remote_code))
    return TokenizerProcess(
        folder,
        version=_sha256_of(*hashes),
        trust_remote_code=trust_remote_code and brings_code(folder),
        use_template=use_template,
        template=template,
    )


def tokenised_table(
    source: PromptSource, tokenizer_dir: Path, folder: Path, *, write_cache: bool
) -> pa.Table:
    """Return the table (`SCHEMA`) of a prompts file: mapped from the cache in `folder`, or new."""
    try:
        path = folder / f"{content_key(source, tokenizer_dir)}.arrow"
    except PermissionError as error:
        raise UsageError(
            f"cannot be tokenised: {error.filename} cannot be read ({error.strerror})",
            flag=source.given,
            remedy="correct its permissions",
        ) from error
    table = _map_table(path, source.max_prompt_tokens)
    if table is not None:
        return table
    if write_cache:
        return _tokenise_once(source, tokenizer_dir, path)
    return _tokenise_aside(source, tokenizer_dir)


def _tokenise_once(source: PromptSource, tokenizer_dir: Path, path: Path) -> pa.Table:
    """Write the cache file unless another process of this node just did; return it mapped."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            table = _map_table(path, source.max_prompt_tokens)
            if table is None:
                _write_table(source, tokenizer_dir, path)
                table = _map_table(path, source.max_prompt_tokens)
    except OSError as error:
        logger.warning(
            "the cache %s cannot be used (%s); prompts are tokenised into a temporary file, by "
            "each process and at each start",
            path.parent,
            error,
        )
        return _tokenise_aside(source, tokenizer_dir)
    return _readable(table, path)


def _tokenise_aside(source: PromptSource, tokenizer_dir: Path) -> pa.Table:
    """Tokenise into a temporary file of this process; return it mapped."""
    with tempfile.TemporaryDirectory(prefix="mcore_rl_") as folder:
        path = Path(folder) / "prompts.arrow"
        _write_table(source, tokenizer_dir, path)
        # Stays mapped after the folder is removed.
        return _readable(_map_table(path, source.max_prompt_tokens), path)


def _readable(table: pa.Table | None, path: Path) -> pa.Table:
    if table is None:
        raise RuntimeError(f"the prompt cache {path} cannot be read right after it was written")
    return table


def _map_table(path: Path, max_prompt_tokens: int) -> pa.Table | None:
    """Return the mapped table; None if the file is missing, incomplete or for another limit."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (pa.ArrowInvalid, OSError):
        return None
    if table.schema != SCHEMA:
        return None
    is_cut, num_tokens = (table.column(name).to_numpy() for name in ("is_cut", "num_tokens"))
    return None if (num_tokens[is_cut] <= max_prompt_tokens).any() else table


def _write_table(source: PromptSource, tokenizer_dir: Path, path: Path) -> None:
    """Tokenise the file; the result appears at `path` complete or not at all."""
    process = tokenizer_process(
        tokenizer_dir,
        source.template,
        use_template=source.use_chat_template,
        trust_remote_code=source.trust_remote_code,
    )
    process.open()
    unfinished = path.with_name(f"{uuid.uuid4().hex}.tmp")  # unique, as other nodes may write, too
    try:
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            num_left = _NUM_SHOWN
            for batch in _batches(read_rows(source)):
                tokenised = _tokenised(batch, process, source)
                shown = _shown(tokenised, num_left, process, source)
                num_left -= len(shown)
                columns = [
                    [*_columns(row, made), shown.get(place)]
                    for place, (row, made) in enumerate(tokenised)
                ]
                arrays = [
                    pa.array(column, kind.type)
                    for column, kind in zip(zip(*columns, strict=True), SCHEMA, strict=True)
                ]
                writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _batches(rows: Iterable[PromptRow]) -> Iterator[list[PromptRow]]:
    """Yield batches of rows, limited in rows and characters per tokenisation."""
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
    rows: list[PromptRow], process: TokenizerProcess, source: PromptSource
) -> list[tuple[PromptRow, Tokenised]]:
    """Return the rows with their tokens; a row that is skipped has its problem."""
    good = [row for row in rows if not row.problem]
    requests = [
        row.request(use_chat_template=source.use_chat_template, system_prompt=source.system_prompt)
        for row in good
    ]
    limit, skips = source.max_prompt_tokens, source.skips_bad_rows
    results: list[Tokenised | str]
    try:
        if source.responses is not None:
            append_end = source.responses.append_end
            results = process.demonstrate(requests, limit=limit, append_end=append_end, skips=skips)
        else:
            results = process.tokenise(
                requests, limit=limit, special=not source.use_chat_template, skips=skips
            )
    except (RowRejected, ProcessEnded) as error:
        if isinstance(error, ProcessEnded) and len(good) > 1:
            # Retry row by row to find the one at fault.
            return [pair for row in rows for pair in _tokenised([row], process, source)]
        raise _refusal(error, good, process, source) from error
    made = iter(results)
    return [(row, _NOTHING) if row.problem else _checked(row, next(made), source) for row in rows]


def _checked(
    row: PromptRow, made: Tokenised | str, source: PromptSource
) -> tuple[PromptRow, Tokenised]:
    if isinstance(made, Tokenised):
        if made.least or (made.ids and list(made.spans[:1]) != [0]):
            return row, made
        made = "its prompt has no tokens, and the model needs at least one"
    error = RejectedRow(made, "write a prompt that the tokenizer reads, or remove the row")
    return bad_row(source, row.place, error), _NOTHING


def _shown(
    rows: list[tuple[PromptRow, Tokenised]],
    count: int,
    process: TokenizerProcess,
    source: PromptSource,
) -> dict[int, str]:
    """Return `SCHEMA`'s `shown` of the first `count` rows within the limit, by their place."""
    parts: dict[int, list[list[int]]] = {}
    for place, (_, made) in enumerate(rows):
        if len(parts) == count:
            break
        if 0 < len(made.ids) <= source.max_prompt_tokens:
            bounds = [0, *made.spans, len(made.ids)]
            parts[place] = [made.ids[a:b] for a, b in itertools.pairwise(bounds)]
    if not parts:
        return {}
    texts = iter(process.decode([ids for each in parts.values() for ids in each]))
    return {
        place: json.dumps([next(texts) for _ in each], ensure_ascii=False)
        for place, each in parts.items()
    }


def _columns(row: PromptRow, made: Tokenised) -> Iterator[Any]:
    """Yield the values of `SCHEMA` for a row but the last."""
    ids, least, left_out, spans = made
    cut = least > 0
    is_empty = cut or bool(row.problem)
    texts = ["", "", ""] if is_empty else [row.text, json.dumps(row.answer), row.as_json()]
    yield from texts
    yield ids
    yield least or len(ids)
    yield max(ids, default=-1)
    yield cut
    yield left_out
    yield spans
    content = json.dumps([*texts, ids, *([spans] if spans else ())]).encode()
    yield hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
    yield row.problem or None


def _refusal(
    error: RowRejected | ProcessEnded,
    rows: list[PromptRow],
    process: TokenizerProcess,
    source: PromptSource,
) -> UsageError:
    row = error.row if isinstance(error, RowRejected) else None
    if row is not None:
        place = rows[row].place
    elif len(rows) == 1:
        place = rows[0].place
    else:
        place = f"{rows[0].place} to {rows[-1].place}"
    if isinstance(error, ProcessEnded):
        what = "chat template or tokenizer" if source.use_chat_template else "tokenizer"
        problem, remedy = f"the {what} of {process.folder} cannot be run ({error})", ""
    else:
        problem, remedy = error.problem, error.remedy
    return UsageError(
        f", {place}: {problem}",
        flag=source.given,
        remedy=remedy or f"correct the row, or use another tokenizer than that of {process.folder}",
    )


# The cache's name ---------------------------------------------------------------------------------


def content_key(source: PromptSource, tokenizer_dir: Path) -> str:
    """Return a hash of everything that decides the tokens of a source."""
    runs_code = source.trust_remote_code and brings_code(tokenizer_dir)
    template = source.template
    uses = source.use_chat_template
    # Contents rather than times: a copied or touched file is the same, a changed one is not.
    return _sha256_of(
        _FORMAT,
        _sha256_of_file(source.path),
        source.path.suffix,
        source.prompt_column,
        source.answer_column,
        source.skips_bad_rows,
        None if source.responses is None else dataclasses.astuple(source.responses),
        uses,
        *((template.text() or template.chosen, template.kwargs) if uses else ()),
        *(() if source.system_prompt is None else (source.system_prompt,)),
        _date_of(source, tokenizer_dir),
        *_versions(runs_code=runs_code),
        # Code may change the tokens, and a cache must not hide that the code is needed.
        *_tokenizer_hashes(tokenizer_dir, runs_code=runs_code),
    )


def _date_of(source: PromptSource, folder: Path) -> str | None:
    """Return the date given to templates, if the text of one that may be used asks for it."""
    if not source.use_chat_template:
        return None
    text = source.template.text()
    texts = (
        path.read_bytes()
        for path in _tokenizer_files(folder, runs_code=source.trust_remote_code)
        if path.suffix in (".jinja", ".py") or path.name in _MAY_HOLD_TEMPLATES
    )
    asks = any(_ASKS_FOR_DATE in each for each in (texts if text is None else (text.encode(),)))
    return (source.template.date or date.today().isoformat()) if asks else None


def _versions(*, runs_code: bool) -> list[str]:
    """Return the versions of libraries that affect results; of all, if code may import any."""
    distributions = importlib.metadata.distributions
    by_library = (distribution for name in LIBRARIES for distribution in distributions(name=name))
    installed = distributions() if runs_code else by_library
    versions = {f"{canonicalize_name(each.name)} {each.version}" for each in installed}
    return [*sorted(versions), unicodedata.unidata_version]


def _tokenizer_files(folder: Path, *, runs_code: bool) -> Iterator[Path]:
    """Yield all files except weights, and named templates.

    With code, sub-folders are included, since code may give its vocabulary any name."""
    templates = folder.glob("additional_chat_templates/*.jinja")
    for path in sorted(folder.rglob("*") if runs_code else [*folder.iterdir(), *templates]):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        is_weights = path.suffix in _WEIGHTS or (
            path.suffix == ".bin" and path.name.startswith(_WEIGHTS_OF_TORCH)
        )
        is_index = path.name.endswith(".index.json")  # of weights; does not affect tokens
        is_code = path.suffix == ".py" and not runs_code
        if not (is_hidden or is_weights or is_index or is_code) and path.is_file():
            yield path


def _tokenizer_hashes(folder: Path, *, runs_code: bool) -> Iterator[str]:
    for path in _tokenizer_files(folder, runs_code=runs_code):
        yield f"{path.relative_to(folder)} {_sha256_of_file(path)}"


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
