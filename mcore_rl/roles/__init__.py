"""Who does what on which ranks: actor and engines, critic, reward model.

Another role is a class whose methods are called (`remote`), a name with its ranks in
`mcore_rl.flags.roles` and `world`, and a line of the table in `mcore_rl.trainer.models`.
"""
