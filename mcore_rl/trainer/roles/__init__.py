"""Roles and their ranks: critic, reference and reward model, in addition to actor and engines.

Critic and reward model are served (`remote`). Another such role is a class whose methods are
called, a name with its ranks in `mcore_rl.model.roles` and `mcore_rl.trainer.job`, and a line of
the table in `mcore_rl.trainer.models`.
"""
