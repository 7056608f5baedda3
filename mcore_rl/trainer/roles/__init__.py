"""Who does what on which ranks: critic, reference, reward model, beside actor and engines.

Critic and reward model are served (`remote`): another such role is a class whose methods are
called, a name with its ranks in `mcore_rl.flags.roles` and `world`, and a line of the table in
`mcore_rl.trainer.models`.
"""
