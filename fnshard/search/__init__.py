"""Search: find the fastest plan that fits, on paper.

`walk` goes through a space of plans by their price. `space` has the plans of a function, from which `fit`
chooses; `experiments.plan` has the plans of a decoder on so many devices. `price` prices a lowered step.

`fit` makes a `FunctionSpace` and runs a `Walk` through it. `FunctionSpace.price` lowers each plan
(`MeshPlans.lower`), and nothing is compiled.
"""
