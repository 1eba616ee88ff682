"""Update: an optimizer of whole leaves as programs of each rank's blocks, with the exchanges between them."""
