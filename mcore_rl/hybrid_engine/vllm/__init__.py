"""vLLM: its engine in this process, what its model needs, and loading into it in place."""
