"""The interface to Megatron-core: arguments, models, optimizer, passes and checkpoints."""
