"""Compile an optimizer of whole leaves into programs of each rank's blocks, with exchanges between them."""
