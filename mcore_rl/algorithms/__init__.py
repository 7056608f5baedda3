"""What an update is made of: advantages, losses, corrections, and the recipes that combine them.

    rewards -> advantages -> policy and value loss -> sums for metrics
               estimators    policy_losses             recipes says which of each
               kl            total_loss, aggregation
                             mismatch, value_loss

Everything here is pure: tensors in, tensors out, and neither Megatron nor vLLM nor
torch.distributed. This file imports nothing, so that `mcore_rl.algorithms.registry` stays as light
as a user's own file wants it (see there).

Shape legend: n samples of the global step, b samples of this data-parallel rank, t tokens of those
b samples one after the other (prompt and response, no padding). `[t]` tensors are in scoring
alignment: position j of a sample speaks of its token j+1, and the sample's last position speaks of
nothing and is masked. A sample is never split over two calls.
"""
