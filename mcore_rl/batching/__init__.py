"""Conversion of scored rollouts into the rows of a model.

`assignment` divides samples among data-parallel ranks and micro-batches. `train_batches` builds a
rank's tensors, `rows` a micro-batch's, which are cut over context parallelism and may share prompts
(`shared_prompts`). `attention_batches` groups a row's samples for attention, and `accounting`
prints the counts of a step.
"""
