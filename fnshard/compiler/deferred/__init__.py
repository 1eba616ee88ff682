"""Modules built without their memory, to be filled leaf by leaf."""
