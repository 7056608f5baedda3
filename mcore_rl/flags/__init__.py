"""The flags: our options, those given, those derived, and what of Megatron's has an effect."""
