"""Ragged: dims whose length depends on data, as dims of a known size and a count.

Where `fn` makes such a length (a mask as an index, `nonzero`, `unique`, ...), it is traced with symbols for
it, as `torch.export` traces; no code of `fn` sees another length than the true one. The graph is then run
on tensors of known sizes, and this run is traced: a dim of length `u` has `size` entries, the largest that
`u` can be or what `fs.bounded` promises. The first `count` of them are the values. The others are padding:
copies of the first value, or what ops compute from these. The rules of `ragged.run` keep padding out of
everything that mixes entries, so that results and gradients are exact.
"""
