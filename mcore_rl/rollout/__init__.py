"""Rollout: sample a step's responses and their rewards as a stream.

    Collector ── sample() ──► RolloutWorkers ──► run_stream ── submit, end, drop, step ──► engine
                                                  │     ▲
                           schedule(), finished() │     │ StreamActions
                                  between_steps() ▼     │
    reward pools ◄─── begin() ──────────────── GroupScheduler ── start(), turn() ──► Conversations
    and servers  ──── finished() ────────────►    │     ▲     ◄────── events() ───── of processes
                                   record_group() │     │ next_draw()
                                                  ▼     │
                                                Dispatcher ◄── counters ──► TCP store ◄──► others

    Collector ── settle() ──► remaining rewards; one table of the samples of all TP groups
    Learner ─── deliver() ──► SampleStore: tokens move to the ranks that train on them

Who waits for what, and what ends the wait:

    run_stream, first rank     the engine's step. While no request runs and more may come, it polls
                               rewards, environments and draws every millisecond.
    run_stream, other ranks    StreamActions, which the first rank of the TP group broadcasts.
    run_stream, other TP       `any_rank`: TP groups of one engine (data parallel) step together,
    groups of the engine       with empty steps, until none has or expects requests.
    a sample between turns     its environment. Its event arrives in `between_steps`; the engine
                               continues with other samples.
    a group without rewards    its rewards. They arrive in `between_steps`; the engine continues.
    Dispatcher.next_draw       does not block. Returns None while a draw may still become available:
                               until a TP group records a group, or fails.
    settle                     first the rewards of its own TP group, then all ranks (all_gather).
    deliver                    all ranks (exchange of bytes).

Sampling ahead, on ranks that only run engines (--rl-rollout-ranks, --rl-max-staleness 1 or more):

    serve ── a call of the actor's ranks ──► AheadSampler ──► step_engine ──► engine
          ── no call: work_until() ────────►  │                 │     ▲
                                              │     schedule(), │     │ StreamActions
                                              │     finished()  ▼     │ (stop: back to the caller)
                        pause(), resume(),    ├────────► ContinuousScheduler ── append() ──► Bank
                        take(), forget()      │             │     ▲
                                              │   start(),  │     │ next_draw()
                                              │   finish()  ▼     │
                        begin_step(),         └────────────► SharedDraws ◄── store ──► others
                        decision()                                └── on one rank: Admission

    AheadSampler.pause         running requests, each of which ends with its next token.
    AheadSampler.collect       the step's decision, by the `Admission`: until enough groups of any
                               TP group have finished. The engine steps meanwhile.
    AheadSampler.work_until    a call, which a counter in the store announces. The engine steps
                               meanwhile, or polls draws, rewards and environments.
    a group in the Bank        the disk, in a thread. The group counts as finished afterwards.
    SharedDraws                does not block.

With --rl-deterministic, `between_steps` waits for all environments and, if groups are compared, for
all rewards, so that their speed has no influence. If rewards fail, the stream of their TP group
ends, `Dispatcher.fail` ends the waits of other TP groups, and `settle` raises the error on all
ranks.
"""
