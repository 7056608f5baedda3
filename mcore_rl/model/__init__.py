"""Description of a model without Megatron or vLLM: family, config.json, layouts of ranks,
checkpoint tensors, and the place of each tensor in Megatron's parameters."""
