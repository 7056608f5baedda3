"""Conversion of scored rollouts into the rows of a model.

`dealing` assigns samples to data-parallel ranks and micro-batches. `train_batches` builds the
tensors of a rank, `rows` those of a micro-batch: they are cut over context parallelism and may
share prompts (`shared_prompts`). `attention_batches` groups a row's samples for attention, and
`accounting` prints the counts of a step.
"""
