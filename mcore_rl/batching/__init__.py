"""From scored rollouts to the rows that a model eats.

`dealing` decides which samples go to which data-parallel rank and micro-batch;
`train_batches` makes the tensors of a rank, `rows` those of a micro-batch, cut over context
parallelism, in which prompts may be shared (`shared_prompts`).
`attention_batches` says which of a row's samples attention takes at once, and `accounting` prints
what a step comes to.
"""
