"""Saving a run and going on with it: complete checkpoints only, and all that decides the next step.

`folders` what is on disk (pure), `choice` which checkpoint a run goes on from, `trainer_state` what
Megatron's checkpoint does not hold, `saver` puts a checkpoint together.
"""
