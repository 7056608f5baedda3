"""Repairs of upstream packages, installed as `mcore_rl.patches`.

One module per repair; its docstring gives the symptom, the cause, why the repair is safe, the state
upstream, when to drop it, and the versions it was tried with. `registry` applies each once, with a
log line, and only to a version that it names, or for Megatron to code that looks as expected.
Importing this package changes nothing.
"""
