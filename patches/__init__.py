"""Repairs of upstream packages, installed as `mcore_rl.patches`.

One module per repair; its docstring gives the symptom, the cause, why the repair is safe, the state
upstream, when to drop it, and the versions it was tried with. `registry` applies them: once, with
one log line each, and only to versions that they name, or of Megatron to code that looks as they
expect. Importing this package changes nothing.
"""
