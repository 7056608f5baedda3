"""Prompts: their files, the order of draws, and the tokenizer."""
