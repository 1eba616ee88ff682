"""The program and what is known of it: inputs, source lines, failures, what `fn` reads."""
