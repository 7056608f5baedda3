"""Sampling: prompts to the engines, responses and their rewards back."""
