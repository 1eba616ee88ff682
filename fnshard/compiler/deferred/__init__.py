"""Build modules without their memory, and fill them leaf by leaf."""
