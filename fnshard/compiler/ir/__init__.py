"""The program and what is known about it: inputs, source lines, failures, and what `fn` reads."""
