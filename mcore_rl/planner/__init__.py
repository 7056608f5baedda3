"""Planner of a job before it starts: its memory in every phase, and the traffic of its hand-over.

See docs/using/planner.md.

All modules are pure: integers and `ModelShape` in, dataclasses out. The command is in
`mcore_rl.tools.plan`.
"""
