"""The step: `shard_step` and what it keeps.

A call, from `step(state, *batch)` to a reduce-scatter:

    step.Step.__call__        checks the state, and passes on the numbers of this step
    cache.ProgramCache.get    returns the program of such a batch: one that is kept, or one that
                              `compiler.lower` makes from the settings that `settings` makes of specs,
                              optimizer and options
    runner.Runner.prepare     the first time, lets ranks agree, compiles the kernels and binds the program to
                              this rank; always, makes the environment of stored blocks, batch, constants
                              and keys
    runner.Bound.run          in `runtime.executor`, executes one instruction of the schedule after the other;
                              a ReduceScatter issues its collective, and a later Wait takes its result (CPU
                              ranks that share memory pack and sum at the Wait)
    step.Step._advance        makes the new state and the metrics; without an optimizer,
                              `_collect_gradients` makes loss and gradients
"""
