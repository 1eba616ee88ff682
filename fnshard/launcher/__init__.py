"""Start, watch and end the ranks of one machine, and say why they died."""
