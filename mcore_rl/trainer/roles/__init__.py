"""Roles and their ranks: critic, reference, reward model and teacher, in addition to actor and
engines.

Critic, reward model and a teacher of another shape are served (`remote`). Another such role is a
class whose methods are called, a name with its ranks in `mcore_rl.model.roles` and
`mcore_rl.trainer.job`, and a line of the table in `mcore_rl.trainer.models`.
"""
