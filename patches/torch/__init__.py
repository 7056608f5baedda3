"""Repairs of torch itself, for whoever uses it here: Megatron's lists and vLLM's name them."""
