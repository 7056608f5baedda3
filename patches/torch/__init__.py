"""Repairs of torch itself; the lists of Megatron's and vLLM's patches name them."""
