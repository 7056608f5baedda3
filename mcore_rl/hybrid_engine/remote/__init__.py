"""Engines in other processes, updated through vLLM's weight transfer."""
