"""Training jobs: loops, steps, reports, checkpoints, resume."""
