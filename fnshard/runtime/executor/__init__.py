"""The executor: a loop over the instructions of a schedule, each bound once."""
