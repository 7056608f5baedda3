"""Saving and resuming a run: complete checkpoints only, with all that determines the next step.

`folders` checkpoints on disk (pure), `point` which checkpoint a run resumes from and the state
there, `trainer_state` what Megatron's checkpoint does not hold. `checkpoint_writer` writes a
checkpoint.
"""
