"""Megatron-core as we use it: its arguments, models, optimizer, passes and checkpoints."""
