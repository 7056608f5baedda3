"""Rollout: sample groups of responses and their rewards as a stream.

    Sampler ── begin_step(), sample() ──► GroupSampler ──► step_engine ── submit, step ──► engine
                                             │              │     ▲
                                             │  schedule(), │     │ StreamActions
                                             │  finished()  ▼     │ (stop: back to the caller)
    reward pools ◄── begin() ────────────────┼──────────── Scheduler ── start() ──► Conversations
    and servers  ─── finished() ─────────────┼───────────►  │     ▲  ◄─ events() ── of processes
                                             │     start(), │     │
                                             │    finish()  ▼     │ next_draw()
                        begin_step(),        └────────────► Draws ◄──── store ────► others
                        decision()                            └── on one rank: Admission

    Sampler ── score() ───► RolloutWorkers: one table of the samples of all TP groups
    Learner ─ deliver() ──► SampleStore: tokens move to the ranks that train on them

Who waits for what, and what ends the wait:

    step_engine, first rank    the engine's step. While no request runs, it polls rewards,
                               environments, draws and the decision.
    step_engine, other ranks   StreamActions, which the first rank of the TP group broadcasts.
    step_engine, other TP      `any_rank`: TP groups of one engine (data parallel) step together,
    groups of the engine       with empty steps, until all have stopped.
    a sample between turns     its environment. Its event arrives in `between_steps`; the engine
                               continues with other samples.
    a group without rewards    its rewards. They arrive in `between_steps`; the engine continues.
                               With a bank, the group counts as finished once it is on the disk.
    GroupSampler.sample        the step's decision, by the `Admission`: until enough groups of any
                               TP group have finished, or one TP group has failed.
    GroupSampler.end_step      running requests, which are dropped or end with their next token; the
                               rewards of responses here; then all ranks.
    deliver                    all ranks (exchange of bytes).
    Draws                      does not block.

Engines on ranks or machines of their own sample ahead (--rl-max-staleness 1 or more): they do not
stop when a step is decided.

    serve ── a call of the actor's ranks ──► Sampler.pause, collect, save
          ── no call ──────────────────────► Sampler.work_until: until a counter in the store
                                             announces one. The engine steps meanwhile.

With --rl-deterministic, `between_steps` waits for all environments and, if groups are compared, for
all rewards, so that their speed has no influence. If rewards fail, the stream of their TP group
ends, `Draws.stop_all` ends the waits of others, and all ranks raise the error.
"""
