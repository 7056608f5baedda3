"""Engines in processes of their own, by vLLM's weight transfer."""
