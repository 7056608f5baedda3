"""Conversion of scored rollouts into the inputs of a model.

`assignment` divides samples among data-parallel ranks and micro-batches. `train_batches` builds the
tensors of a rank, and `rows` those of a micro-batch, which are cut over context parallelism and may
share prompts (`shared_prompts`). `attention_batches` groups the samples of a row for attention.
`sample_exchange` moves samples between ranks, and `accounting` prints the counts of a step.

This package is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""
