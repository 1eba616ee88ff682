"""Layout: what a leaf's spec means, and how specs are chosen."""
