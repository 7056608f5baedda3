"""Prompts: files of them, in which order they are drawn, and the tokenizer."""
