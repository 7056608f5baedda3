"""Description of a model: family, config.json, layouts of ranks, tensors and their places.

No module here imports Megatron, vLLM or torch; `tests/unit/test_import_boundaries.py` checks this.
"""
