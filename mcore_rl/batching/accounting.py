"""Counts of a run: prompts, sequences, mini-batches, micro-batches, optimizer steps.

prompts x samples = sequences of a step
sequences / mini-batches: one optimizer step per mini-batch and epoch
a rank's share of a mini-batch, cut into micro-batches
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_rl.batching.rows import MicroBatching, chunks_of_sample, round_up


@dataclass(frozen=True, slots=True)
class ModelAccounting:
    """Counts of one step for one model, actor or critic, in its own layout.

    Micro-batches are counted per pass over one mini-batch on one data-parallel rank. Without
    packing their number is fixed. With packing it depends on the lengths: at least
    `least_micro_batches`, and `full_micro_batches` if every sequence has the maximum length.

    Example: `dp_size` 2, `sequences_per_mini_batch` 32, `least_micro_batches` 1,
    `full_micro_batches` 4.
    """

    dp_size: int
    batching: MicroBatching
    sequences_per_mini_batch: int
    least_micro_batches: int
    full_micro_batches: int
    optimizer_steps_per_step: int
    optimizer_steps: int  # in the complete run

    @property
    def sequences_per_rank(self) -> float:
        """Sequences of a mini-batch per rank; the mean if packing distributes them by cost."""
        return self.sequences_per_mini_batch / self.dp_size


@dataclass(frozen=True, slots=True)
class BatchAccounting:
    """Counts of a step and of the run.

    Example: `prompts_per_step` 16, `samples_per_prompt` 8, `sequences_per_step` 128, `num_steps`
    100.
    """

    prompts_per_step: int
    samples_per_prompt: int  # the most if sources differ
    sequences_per_step: int
    max_sequence_tokens: int  # prompt and response
    num_mini_batches: int
    num_epochs: int
    num_steps: int  # in the complete run
    sequences: int  # in the complete run
    max_draws: int  # draws of prompts per step, including the first; 1 if none is replaced
    critic_warmup_steps: int  # steps in which the actor has no optimizer step
    actor: ModelAccounting
    critic: ModelAccounting | None


def batch_accounting(
    *,
    num_prompts: int,
    samples_per_prompt: int,
    samples_per_step: int | None = None,
    num_mini_batches: int,
    num_epochs: int,
    num_steps: int,
    max_sequence_tokens: int,
    actor: tuple[int, MicroBatching],
    critic: tuple[int, MicroBatching] | None = None,
    critic_warmup_steps: int = 0,
    max_draws: int = 1,
) -> BatchAccounting:
    """Return the counts of a run; `actor`, `critic`: data-parallel size and micro-batching;
    `samples_per_step`: by default every prompt has `samples_per_prompt`, else it has at most so
    many."""
    sequences = samples_per_step or num_prompts * samples_per_prompt
    assert sequences % num_mini_batches == 0, (
        f"{sequences} sequences do not divide into {num_mini_batches} mini-batches"
    )

    def model_accounting(
        dp_size: int, batching: MicroBatching, warmup_steps: int
    ) -> ModelAccounting:
        mini_batch = sequences // num_mini_batches
        least, full = _micro_batches(mini_batch, dp_size, batching, max_sequence_tokens)
        updates = num_mini_batches * num_epochs
        return ModelAccounting(
            dp_size=dp_size,
            batching=batching,
            sequences_per_mini_batch=mini_batch,
            least_micro_batches=least,
            full_micro_batches=full,
            optimizer_steps_per_step=updates,
            optimizer_steps=updates * max(num_steps - warmup_steps, 0),
        )

    return BatchAccounting(
        prompts_per_step=num_prompts,
        samples_per_prompt=samples_per_prompt,
        sequences_per_step=sequences,
        max_sequence_tokens=max_sequence_tokens,
        num_mini_batches=num_mini_batches,
        num_epochs=num_epochs,
        num_steps=num_steps,
        sequences=sequences * num_steps,
        max_draws=max_draws,
        critic_warmup_steps=critic_warmup_steps if critic else 0,
        actor=model_accounting(*actor, critic_warmup_steps if critic else 0),
        critic=model_accounting(*critic, 0) if critic else None,
    )


def _micro_batches(
    mini_batch: int, dp_size: int, batching: MicroBatching, max_sequence_tokens: int
) -> tuple[int, int]:
    """Return a rank's micro-batches: (the least, with all sequences at full length)."""
    if not batching.packed:
        each = dp_size * batching.micro_batch_size
        assert mini_batch % each == 0, f"{mini_batch} sequences do not divide into {each}"
        return mini_batch // each, mini_batch // each
    in_row = round_up(max_sequence_tokens, chunks_of_sample(batching.cp_size))
    together = max(batching.max_tokens // in_row, 1)  # full sequences per micro-batch
    most = math.ceil(mini_batch / dp_size)  # sequences per rank
    multiple = batching.count_multiple_of
    return multiple, math.ceil(math.ceil(most / together) / multiple) * multiple


def describe(accounting: BatchAccounting) -> list[str]:
    """Return the counts as lines of text."""
    a = accounting
    parts = f"{a.num_mini_batches} {_plural('mini-batch', a.num_mini_batches)}"
    is_same = a.prompts_per_step * a.samples_per_prompt == a.sequences_per_step
    first = (
        f"a step: {_n(a.prompts_per_step)} prompts x "
        f"{'' if is_same else 'up to '}{_n(a.samples_per_prompt)} samples = "
        f"{_n(a.sequences_per_step)} sequences of up to {_n(a.max_sequence_tokens)} tokens, in "
        f"{parts} of {_n(a.actor.sequences_per_mini_batch)}, {a.num_epochs} "
        f"{_plural('epoch', a.num_epochs)}"
    )
    lines = [first]
    if a.max_draws > 1:
        lines.append(
            f"groups may be replaced, in {a.max_draws} times a step's draws: up to "
            f"{_n(a.max_draws * a.sequences_per_step)} sequences, of which "
            f"{_n(a.sequences_per_step)} are kept"
        )
    lines.append(_describe_model("actor", a.actor))
    if a.critic is not None:
        lines.append(_describe_model("critic", a.critic))
    steps = f"{_n(a.actor.optimizer_steps)} optimizer steps of the actor"
    if a.critic_warmup_steps:
        steps += f" (none in the first {_n(a.critic_warmup_steps)} steps)"
    if a.critic is not None:
        steps += f", {_n(a.critic.optimizer_steps)} of the critic"
    lines.append(f"the run: {_n(a.num_steps)} steps, {_n(a.sequences)} sequences, {steps}")
    return lines


def _describe_model(name: str, model: ModelAccounting) -> str:
    dp, full, updates = model.dp_size, model.full_micro_batches, model.optimizer_steps_per_step
    share = model.sequences_per_rank
    about = f"{share:.0f}" if share == int(share) else f"about {share:.1f}"
    if model.batching.packed:
        least = model.least_micro_batches
        what = f"packed micro-batches of at most {_n(model.batching.max_tokens)} tokens"
        if model.batching.share_prompts:
            what += " that share prompts between samples"
        count = (
            f"{_n(least)} at least and {_n(full)} with all sequences at full length, that is "
            f"{_n(least * dp * updates)} to {_n(full * dp * updates)} a step on all ranks"
        )
    else:
        what = f"micro-batches of {_n(model.batching.micro_batch_size)}"
        count = f"{_n(full)}, that is {_n(full * dp * updates)} a step on all ranks"
    return (
        f"{name}: {_n(dp)} data-parallel {_plural('rank', dp)} with {about} "
        f"{_plural('sequence', share)} of a mini-batch each, in {what}: {count}; {_n(updates)} "
        f"optimizer {_plural('step', updates)} a step"
    )


def _n(number: int) -> str:
    return f"{number:,}"


def _plural(word: str, number: float) -> str:
    return word if number == 1 else word + ("es" if word.endswith("tch") else "s")
