"""Planner of a job: memory in every phase, traffic of a hand-over, other layouts.

All modules are pure: plain settings and `ModelShape` in, dataclasses out. `trainer.plan_inputs`
makes the settings from flags, and `mcore_rl.tools.plan` is the command. See docs/using/planner.md.

    settings             how a run trains, samples and which machines it has
    models               trained models: parameters and optimizer state of a rank
    activations, engine  memory of a pass in training; memory of an engine's rank
    phases               device memory, phase by phase
    memory, host         host memory of a node, with and without GPUs
    links                traffic of a hand-over
    plan, report         the complete plan; the plan as text
    simulated_engines    engines in simulated time, and the groups that they sample
    simulation           simulated runs: colocated, partial rollouts, separate engines
    comparison           the ways to use a job's ranks, and the one to take
    layouts              other layouts of a job, for advice (flags that help) and search (a ranking)
    checks, savings      what the start of a run refuses, warns of, and reports
"""
