"""Description of a model, without Megatron or vLLM.

It covers family, config.json, layouts of ranks, checkpoint tensors, and their place in Megatron."""
