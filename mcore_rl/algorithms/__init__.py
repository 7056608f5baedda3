"""Parts of an update: advantages, losses, corrections, and the recipes that combine them.

    rewards -> advantages -> policy and value loss -> sums for metrics
               estimators    policy_losses             recipes selects each part
               kl            total_loss, aggregation
                             mismatch, value_loss

This package is pure: tensors in, tensors out. It imports neither Megatron nor vLLM nor
torch.distributed. This file imports nothing, so that importing `mcore_rl.algorithms.registry` from
a user's file stays cheap (see there).

Shape legend: n samples of the global step, b samples of this data-parallel rank, t tokens of those
b samples one after the other (prompt and response, no padding). `[t]` tensors are in scoring
alignment: position j of a sample describes its token j+1, and the sample's last position describes
none and is masked. A sample is never split over two calls.
"""
