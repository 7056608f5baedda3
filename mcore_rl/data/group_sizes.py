"""The samples of a step whose sources of prompts have different numbers of samples per prompt.

The samples of a step must divide into mini-batches and ranks, so their number may not vary. Each
source then has the same whole number of prompts in all steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from mcore_rl.common.errors import UsageError
from mcore_rl.data.sources import SourceSpec


def samples_of_step(
    sources: Sequence[SourceSpec], *, num_prompts: int, num_samples: int, given: str
) -> int:
    """Return the samples of a step of `num_prompts` prompts; `num_samples` is
    --rl-num-samples-per-prompt, `given` the flag of sources as typed.

    Raises UsageError for shares that are not a whole number of prompts, and for sources that all
    have another number of samples than the flag.
    """
    sizes = [each.samples_per_prompt or num_samples for each in sources]
    if not differ(sources, num_samples):
        if sizes and sizes[0] != num_samples:
            raise UsageError(
                f"has samples_per_prompt {sizes[0]} in every source, and --rl-num-samples-per-"
                f"prompt is {num_samples}",
                flag=given,
                remedy=f"give --rl-num-samples-per-prompt {sizes[0]}, and drop it there",
            )
        return num_prompts * num_samples
    weights = [each.weight for each in sources if each.weight is not None]
    if not weights:
        shares = [Fraction(1, len(sources))] * len(sources)
        why = "has sources of different samples_per_prompt and no weights"
    else:
        shares = [each / sum(weights) for each in weights]
        why = ""
        for source, share in zip(sources, shares, strict=True):
            if (num_prompts * share).denominator != 1 and not why:
                why = (
                    f"gives source '{source.name}' {float(num_prompts * share):g} of "
                    f"--rl-num-prompts-per-step {num_prompts} prompts, and sources of different "
                    "samples_per_prompt need a whole number each"
                )
    if why:
        raise UsageError(why, flag=given, remedy=_nearest(sources, shares, num_prompts))
    return sum(int(num_prompts * share) * size for share, size in zip(shares, sizes, strict=True))


def differ(sources: Sequence[SourceSpec], num_samples: int) -> bool:
    """Return whether sources have different numbers of samples per prompt."""
    return len({each.samples_per_prompt or num_samples for each in sources}) > 1


def _nearest(sources: Sequence[SourceSpec], shares: Sequence[Fraction], num_prompts: int) -> str:
    """Return a remedy that names the nearest shares of whole prompts, at least one each."""
    if num_prompts < len(sources):
        return f"raise that to {len(sources)} or more"
    counts = [max(1, math.floor(num_prompts * share)) for share in shares]
    while sum(counts) != num_prompts:
        step = 1 if sum(counts) < num_prompts else -1
        lacks = [step * (num_prompts * s - c) for s, c in zip(shares, counts, strict=True)]
        open_ = [n for n, count in enumerate(counts) if count + step >= 1]
        counts[max(open_, key=lambda n: lacks[n])] += step
    weights = [
        f"{Fraction(count, num_prompts)} for '{source.name}'"
        for source, count in zip(sources, counts, strict=True)
    ]
    return f"give the weights {', '.join(weights)}"
