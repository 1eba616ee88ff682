"""Search: the fastest plan that fits, found on paper.

`walk` goes through a space of plans by their price. `space` has the plans of a function, which `fit` chooses
from; `experiments.plan` has those of a decoder on so many devices. `price` is what a lowered step takes.

In order: `fit` makes a `FunctionSpace` and runs `Walk` through it; `FunctionSpace.price` lowers each plan
(`MeshPlans.lower`), and nothing is compiled.
"""
