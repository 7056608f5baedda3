"""Saving and resuming a run: complete checkpoints only, with all that determines the next step.

`folders` checkpoints on disk (pure), `choice` which checkpoint a run resumes from, `point` the
state there, `trainer_state` what Megatron's checkpoint does not hold. `checkpoint_writer` writes a
checkpoint.
"""
