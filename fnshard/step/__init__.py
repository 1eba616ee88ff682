"""The step: `shard_step` and what it keeps.

A call, from `step(state, *batch)` to a reduce-scatter:

    step.Step.__call__        checks the state, and passes on what this step's numbers are
    cache.ProgramCache.get    the program of such a batch: kept, or lowered by `compiler.lower` from the plan
                              that `plan` makes of specs, optimizer and options
    runner.Runner.prepare     the first time: ranks agree, kernels are compiled, the program is bound to this
                              rank; always: the environment of stored blocks, batch, constants and keys
    runner.Bound.run          `runtime.executor`: one instruction of the schedule after the other; a
                              ReduceScatter issues its collective, a later Wait has its result (CPU ranks
                              that share memory pack and sum at the Wait)
    step.Step._advance        the new state and the metrics, or `_gradients`
"""
