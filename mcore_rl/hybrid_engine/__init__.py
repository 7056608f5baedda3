"""One process, two engines: Megatron's shards and a vLLM worker, and the hand-over between them.

Importing this package imports neither torch nor Megatron nor vLLM; its modules do, by themselves.
"""
