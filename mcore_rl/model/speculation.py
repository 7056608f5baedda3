"""Speculative decoding (`--rl-speculate`): a drafter proposes tokens, the engine verifies them.

Sampling stays exact with any drafter: drafts are accepted with the probability that preserves the
model's own distribution (arXiv 2211.17192). A bad drafter only costs time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.common.errors import UsageError
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.families import family_of
from mcore_rl.model.tensors import mtp_tensors

OFF, MTP, NGRAM = "off", "mtp", "ngram"
MOST_TOKENS = 128  # vllm/v1/sample/rejection_sampler.py, MAX_SPEC_LEN
_FLAG = "--rl-speculate"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafting method and number of drafted tokens per engine step.

    Example: `Speculation("mtp", num_tokens=1)`.
    """

    method: str  # MTP: the checkpoint's own layers; NGRAM: the continuation earlier in the text
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.method}:{self.num_tokens}"

    @property
    def has_drafter(self) -> bool:
        """Whether the engine holds weights in addition to the model's."""
        return self.method == MTP


def parse_speculation(text: str) -> Speculation | None:
    """Parse `off`, `mtp:N` or `ngram:N`; raise UsageError for anything else."""
    if text == OFF:
        return None
    match = re.fullmatch(rf"({MTP}|{NGRAM}):(\d+)", text)
    if match is None or not 1 <= int(match[2]) <= MOST_TOKENS:
        raise UsageError(
            f"is not off, mtp:N or ngram:N with N of 1 to {MOST_TOKENS}",
            flag=f"{_FLAG} {text}",
            remedy="give for example mtp:1 or ngram:4",
        )
    return Speculation(match[1], int(match[2]))


def check_drafter(speculation: Speculation | None, shape: ModelShape) -> None:
    """Refuse a drafter that vLLM does not have for the model of config.json."""
    if speculation is None or not speculation.has_drafter:
        return
    flag, count = f"{_FLAG} {speculation}", shape.num_mtp_layers
    instead = f"give {NGRAM}:{speculation.num_tokens}, which needs no weights, or off"
    if not count:
        raise UsageError(
            "needs multi-token-prediction layers, and config.json has none "
            "(num_nextn_predict_layers)",
            flag=flag,
            remedy=instead,
        )
    if not family_of(shape.architecture).has_drafter:
        raise UsageError(
            f"needs a drafter of vLLM's for model_type '{shape.architecture}', which it does not "
            "have",
            flag=flag,
            remedy=instead,
        )
    if speculation.num_tokens > count and speculation.num_tokens % count:
        raise UsageError(
            f"is not a multiple of the {count} multi-token-prediction layers that vLLM repeats",
            flag=flag,
            remedy=f"give {MTP}:{count}, or a multiple",
        )


def check_drafter_weights(
    speculation: Speculation | None,
    shape: ModelShape,
    held: Mapping[str, tuple[int, ...]],
    folder: str,
) -> None:
    """Refuse a checkpoint whose MTP tensors (shapes in `held`) do not match config.json."""
    if speculation is None or not speculation.has_drafter:
        return
    for name, spec in mtp_tensors(shape):
        if held.get(name) != spec.shape:
            problem = f"has it of shape {list(held[name])}" if name in held else "lacks it"
            raise UsageError(
                f"needs {name} of shape {list(spec.shape)}, and --rl-hf-checkpoint {folder} "
                f"{problem}",
                flag=f"{_FLAG} {speculation}",
                remedy=f"copy the checkpoint again, or give {NGRAM}:{speculation.num_tokens}",
            )
