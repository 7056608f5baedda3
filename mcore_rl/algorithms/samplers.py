"""Responses that a user's function samples itself, for `@sampler` and --rl-sampler.

The function is a generator. It yields lists of sequences, which the engine continues, and gets what
the engine added to each. It returns the responses to the prompt:

    @sampler("best_of_two")
    def best_of_two(inputs, config):
        count = 2 * inputs.num_samples
        drafts = yield [Generate(inputs.prompt.token_ids)] * count
        drafts.sort(key=lambda draft: len(draft.token_ids))
        return [Sampled(each.token_ids, each.log_probs) for each in drafts[: inputs.num_samples]]

Shape legend: p tokens that are given; r tokens of a response.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters
from mcore_rl.common.user_code import shortened

_MOST_SEQUENCES = 4096  # of one `yield`


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """The prompt of a group, and what is sampled for it.

    Example: `SamplerInputs(prompt, num_samples=8, max_tokens=512, decode=tokenizer.decode)`.
    """

    prompt: Any  # the `batching.types.Prompt`
    num_samples: int  # responses to return
    max_tokens: int  # of a response
    decode: Callable[[Sequence[int]], str]  # tokens -> text, without special tokens


@dataclass(frozen=True, slots=True)
class Generate:
    """A sequence that the engine continues, by the run's temperature, top-p and top-k.

    Example: `Generate(prompt.token_ids, max_tokens=16)`.
    """

    token_ids: Sequence[int] | np.ndarray  # [p]
    max_tokens: int | None = None  # None: those that a response may still have


@dataclass(frozen=True, slots=True)
class Generated:
    """What the engine added to a sequence.

    Example: `Generated(array([17, 2]), array([-0.1, -0.01]), "stop")`.
    """

    token_ids: np.ndarray  # [r] int32, the end of sequence included if it was sampled
    log_probs: np.ndarray  # [r] float32, under the distribution that was sampled from
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A response to train on.

    Example, whose first token the function wrote itself:
    `Sampled([5, 17, 2], [0.0, -0.1, -0.01], is_generated=[False, True, True])`.
    """

    token_ids: Sequence[int] | np.ndarray  # [r], at least one
    log_probs: Sequence[float] | np.ndarray  # [r], of `Generated`; not read where not generated
    # [r] bool, whether the engine sampled the token: others are not trained on. None: all.
    is_generated: Sequence[bool] | np.ndarray | None = None
    finish_reason: str = "stop"  # "length": cut at the limit, see --rl-mask-truncated


Steps = Generator[Sequence[Generate], list[Generated], Sequence[Sampled]]


@dataclass(frozen=True, slots=True)
class RegisteredSampler:
    """A function that samples groups, and its parameters."""

    name: str
    function: Callable[[SamplerInputs, Any], Steps]
    parameters: Parameters

    def start(self, inputs: SamplerInputs, parameters: Parameters) -> Steps:
        """Return the generator of a group, whose first step has not run."""
        steps: Any = self.checked(inputs, lambda: self.function(inputs, parameters))
        if not isinstance(steps, Generator):
            raise self.refusal(inputs)(
                f"returned {shortened(repr(steps))} and is not a generator",
                remedy="yield lists of Generate in the function",
            )
        return steps

    def checked(self, inputs: SamplerInputs, step: Callable[[], Any]) -> Any:
        """Run a step of the function. Raises UsageError for what the function raises, except
        StopIteration, which ends a generator."""
        try:
            return step()
        except StopIteration:
            raise
        except Exception as error:  # the user sees whatever their function raises
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise self.refusal(inputs)(
                f"raised {type(error).__name__}: {shortened(str(error))}, in line {at.lineno} of "
                f"{at.filename}, for row {inputs.prompt.index}",
                remedy="correct the function",
            ) from error

    def refusal(self, inputs: SamplerInputs) -> Callable[..., UsageError]:
        """Return a UsageError of this sampler, without its sentence."""
        return functools.partial(UsageError, flag=f"--rl-sampler {self.name}")

    def sequences(self, inputs: SamplerInputs, asked: Any, vocab_size: int) -> list[Generate]:
        """Return what a `yield` asks for, with arrays and limits. Raises UsageError."""
        refusal, row = self.refusal(inputs), inputs.prompt.index
        if not isinstance(asked, Sequence) or not 0 < len(asked) <= _MOST_SEQUENCES:
            raise refusal(
                f"yielded {shortened(repr(asked))} for row {row}",
                remedy=f"yield a list of 1 to {_MOST_SEQUENCES} Generate",
            )
        sequences, num_prompt = [], len(inputs.prompt.token_ids)
        for each in asked:
            tokens = None if not isinstance(each, Generate) else _tokens(each.token_ids, vocab_size)
            if tokens is None:
                raise refusal(
                    f"yielded {shortened(repr(each))} for row {row}",
                    remedy=f"yield Generate with token ids from 0 to {vocab_size - 1}",
                )
            left = inputs.max_tokens + num_prompt - len(tokens)
            most = left if each.max_tokens is None else each.max_tokens
            if not 0 < most <= left:
                raise refusal(
                    f"asked for {most} tokens after {len(tokens)} for row {row}, whose prompt and "
                    f"response have {num_prompt} and at most {inputs.max_tokens}",
                    remedy="ask for fewer",
                )
            sequences.append(Generate(tokens, most))
        return sequences

    def responses(self, inputs: SamplerInputs, returned: Any, vocab_size: int) -> list[Sampled]:
        """Return the responses of a group, with arrays. Raises UsageError."""
        refusal, row = self.refusal(inputs), inputs.prompt.index
        if not isinstance(returned, Sequence) or len(returned) != inputs.num_samples:
            raise refusal(
                f"returned {shortened(repr(returned))} for row {row}",
                remedy=f"return a list of {inputs.num_samples} Sampled",
            )
        responses = []
        for number, each in enumerate(returned):
            why = "is not a Sampled"
            if isinstance(each, Sampled):
                response, why = _response(each, inputs.max_tokens, vocab_size)
                responses.append(response)
            if why:
                raise refusal(f": response {number} to row {row} {why}", remedy="correct it")
        return responses


def _tokens(values: Any, vocab_size: int) -> np.ndarray | None:
    """Return token ids as `[n]` int32, None for something else."""
    tokens = np.asarray(values)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        return None
    is_within = ((tokens >= 0) & (tokens < vocab_size)).all()
    return tokens.astype(np.int32) if is_within else None


def _response(sampled: Sampled, max_tokens: int, vocab_size: int) -> tuple[Sampled, str]:
    """Return a response with arrays, and what is wrong with it."""
    tokens = _tokens(sampled.token_ids, vocab_size)
    if tokens is None:
        return sampled, f"has other token ids than 1 to {max_tokens} from 0 to {vocab_size - 1}"
    if len(tokens) > max_tokens:
        return sampled, f"has {len(tokens)} of at most {max_tokens} tokens"
    generated = np.ones(len(tokens), np.bool_)
    if sampled.is_generated is not None:
        generated = np.asarray(sampled.is_generated)
    if generated.shape != tokens.shape or generated.dtype != np.bool_ or not generated.any():
        return sampled, f"needs is_generated of {len(tokens)} bools, of which one is True"
    log_probs = np.asarray(sampled.log_probs)
    if log_probs.shape != tokens.shape or log_probs.dtype.kind != "f":
        return sampled, f"needs log_probs of {len(tokens)} floats"
    kept = np.where(generated, log_probs, 0.0).astype(np.float32)
    if not (np.isfinite(kept) & (kept <= 0.0)).all():
        return sampled, "has log_probs that are not finite and at most 0"
    if sampled.finish_reason not in ("stop", "length"):
        return sampled, f"has the finish_reason {sampled.finish_reason!r}, not stop or length"
    has_others = None if generated.all() else generated
    return Sampled(tokens, kept, has_others, sampled.finish_reason), ""
