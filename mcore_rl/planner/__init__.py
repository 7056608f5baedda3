"""Plans a job before there is one: what fits where, what a hand-over moves.

See docs/using/planner.md.

`models`, `parameters`, `activations`, `phases`, `links` and `search` are pure: integers and
`ModelShape` in, dataclasses out. `command` alone knows of Megatron, of which it uses the argument
parser.
"""
