"""What a model is, without Megatron or vLLM: its family, its config.json, the layouts of its ranks,
the tensors of its checkpoint, and where each lies in Megatron's parameters."""
