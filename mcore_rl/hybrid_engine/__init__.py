"""One process, two engines: Megatron's shards, a vLLM worker, and the hand-over between them.

Importing this package imports neither torch nor Megatron nor vLLM; importing its modules does.
"""
