"""vLLM: its engine in this process, its model's needs, and in-place loading of weights."""
