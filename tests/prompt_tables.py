"""Prompts without a tokenizer: datasets from tables as the cache has them."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pyarrow as pa

from mcore_rl.data.prompt_cache import SCHEMA
from mcore_rl.data.prompts import PromptDataset, PromptSources
from mcore_rl.data.sources import SourceSpec


def dataset(num_rows: int, name: str = "prompt", long: frozenset[int] = frozenset()):
    """Prompts "NAME 0", "NAME 1", ...; rows in `long` are longer than the limit."""
    rows = [
        {
            "text": f"{name} {row}",
            "answer": f'"{row}"',
            "row": "{}",
            "token_ids": [0],
            "num_tokens": 99 if row in long else 1,
            "max_token_id": 0,
            "is_cut": False,
            "left_out": [],
            "digest": f"{name} {row}".encode()[-16:].rjust(16),
        }
        for row in range(num_rows)
    ]
    return PromptDataset(pa.Table.from_pylist(rows, schema=SCHEMA), max_prompt_tokens=9)


def one_source(num_rows: int) -> PromptSources:
    return PromptSources([(SourceSpec("", "p.jsonl"), dataset(num_rows))])


def sources(
    sizes: Mapping[str, int],
    weights: Mapping[str, str] | None = None,
    *,
    per_step: int = 1,
    **options: Any,
) -> PromptSources:
    """Sources by name with numbers of prompts, and with shares such as "0.7"."""
    shares = {name: Fraction(weight) for name, weight in (weights or {}).items()}
    return PromptSources(
        [
            (SourceSpec(name, f"{name}.jsonl", shares.get(name), **options), dataset(size, name))
            for name, size in sizes.items()
        ],
        per_step=per_step,
    )
