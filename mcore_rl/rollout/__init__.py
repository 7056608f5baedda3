"""Rollout: sample a step's responses and their rewards as a stream.

    Collector ─ sample() ─► RolloutWorkers ─► run_stream ◄─ completions ─ engine
                                                │    ▲                       ▲
                     on_each_step: schedule(),  │    │ StreamActions: ───────┘
                     finished(), between_steps()│    │ submit, end, drop
                                                ▼    │
    reward pools, servers ◄─ responses ─── GroupScheduler ─── turns ─► Conversations
                          ── outcomes ──►     │      ▲    ◄─ events ── (environment processes)
                               record_group() │      │ next_draw()
                                              ▼      │
                                            Dispatcher ◄─ counters ─► TCP store ◄─► other TP groups

    Collector ─ settle() ─► remaining rewards, one table of all TP groups ─► the step's samples
    Learner ── deliver() ─► SampleStore of each rank ─► tokens on the ranks that train on them

Who waits, and who ends the wait:

    waits                      for                                  until
    run_stream, first rank     a step of the engine                 the engine returns
      no request is running    a reward, environment or draw        polls them every millisecond
    run_stream, other ranks    StreamActions                        the first rank broadcasts them
    run_stream, DP ranks       the engine's other TP groups         `any_rank` after every step
    a finished group           its rewards; does not block the      `between_steps` finds all of
                               engine                               its outcomes
    a sample between turns     its environment; does not block      `between_steps` finds the event
                               the engine
    Dispatcher.next_draw       never blocks; None while a group     another TP group records a group
                               may still be replaced                that differs, or not, or fails
    settle                     the rewards of its own TP group,     the pools have answered, and
                               then all ranks                       every rank has gathered
    deliver                    all ranks                            the exchange of bytes ends

With --rl-deterministic and groups that are compared, `between_steps` blocks until all outcomes and
environments have answered, so that their speed decides nothing. If rewards fail on a TP group, its
stream ends, its `Dispatcher` marks the step as failed, so that no other TP group waits for it, and
`settle` raises the error on every rank.
"""
