"""The flags: our options, the given ones, the derived ones, and the effect of Megatron's."""
