"""The critic: Megatron's model as a value function. Values before the update, and the update.

It has a layout, an optimizer and a schedule of its own; all of that lives in its `MegatronWorld`,
which every method enters. Shape legend: t tokens of a rank's samples, in scoring alignment
(`mcore_rl.batching.types`): position j's value is that of the state in which token j+1 is chosen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.value_loss import ValueLossSums, value_loss
from mcore_rl.batching.micro_batching import MicroBatching
from mcore_rl.batching.rows import ModelRows
from mcore_rl.batching.types import TrainBatch
from mcore_rl.flags.options import RLConfig
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.optimizer import CheckedOptimizer, UpdateResult
from mcore_rl.megatron.runner import ModelRunner
from mcore_rl.megatron.world import MegatronWorld


@dataclass(frozen=True, slots=True)
class ValueUpdateStats:
    """One optimizer step; the sums are over the global mini-batch and the same on all ranks."""

    sums: ValueLossSums
    result: UpdateResult


class Critic:
    """The value function on this rank's pipeline stage and TP shard, as its own layout has it.

    All methods are collective over the ranks of that layout, and called outside of its world.
    """

    def __init__(
        self,
        world: MegatronWorld,
        config: RLConfig,
        state: megatron_adapter.TrainState,
        batching: MicroBatching,
    ) -> None:
        self.world, self.state, self.batching = world, state, batching
        self.layout = world.layout
        self._loss_config = config.recipe.value_loss_config(config.max_response_tokens)
        with world:
            self.runner = ModelRunner(world.args, state, self.layout, batching, _no_keywords)
        self.optimizer = CheckedOptimizer(
            state, name="critic", on_nonfinite_grad=config.on_nonfinite_grad
        )

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """Value of every position, `[t]` float32 on the CPU, on every rank of TP, CP and PP.

        `batch` is this rank's in the critic's layout.
        """
        with self.world:
            return self.runner.evaluate(batch, num_outputs=1)[:, 0].contiguous()

    def update(self, batch: TrainBatch) -> ValueUpdateStats:
        """One optimizer step on one mini-batch, of which `batch` is this DP rank's part.

        `batch` must have `values` and `returns`. Raises RuntimeError on all ranks for a non-finite
        loss or gradient, unless asked to skip it.
        """
        with self.world:
            loss = functools.partial(self._loss, denominators=self.runner.denominators(batch))
            total = self.runner.accumulate_gradients(
                batch, loss, num_sums=len(ValueLossSums.__slots__)
            )
            result = self.optimizer.step(
                num_samples=self.runner.num_samples(batch), nonfinite_losses=total.nonfinite_ranks
            )
            megatron_adapter.finish_param_sync(self.world.args, self.state)
            return ValueUpdateStats(ValueLossSums.from_stacked(total.sums), result)

    def _loss(
        self, outputs: torch.Tensor, samples: TrainBatch, *, denominators: Denominators
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert samples.values is not None and samples.returns is not None, (
            "a stage before the update left out a tensor of the batch"
        )
        out = value_loss(
            outputs[:, 0],
            old_values=samples.values,
            returns=samples.returns,
            loss_mask=samples.loss_mask,
            lengths=samples.lengths,
            denominators=denominators,
            config=self._loss_config,
        )
        return out.loss, out.sums.stacked()


def _no_keywords(rows: ModelRows) -> dict[str, object]:
    return {}
