"""Schedule: the instructions of one step, how they are built, moved by passes, and verified."""
