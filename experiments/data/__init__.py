"""Data: files of text on one end, equal global batches on any number of ranks on the other.

For fine-tuning, samples:

| module | what |
|---|---|
| `pieces` | stretches of text and whether they are to be learned; token ids of many at once |
| `control` | control tokens that a text spells, and text that stands behind other text |
| `bytelevel`, `tokenizer` | the built-in byte tokenizer, tokenizers from files |
| `renderer`, `rendering`, `template` | chat templates run apart, and what in their text people wrote |
| `lines`, `records` | lines of JSONL, and the samples, pairs and choices they describe |
| `arrays`, `writer`, `prepared` | files tokenised once into a folder all ranks map; all their mistakes |
| `permutation`, `packing` | the order of an epoch, samples to a row |
| `batches`, `loader` | rows as tensors; endless batches and exact resume |
| `builtin` | real examples every machine has: signatures and docstrings of the standard library |

    tokenizer = byte_tokenizer()
    prepared = prepare([train_file], tokenizer, context=256, cache=folder)  # before any rank starts
    loader = PackedLoader(open_prepared(prepared.folder), rows=8, rank=rank, ranks=ranks)

For pre-training, shards of tokens, which `python -m experiments.tokenize` writes:

| module | what |
|---|---|
| `sources`, `spans` | the files of folders and globs, and which bytes of them a shard is made of |
| `crew`, `shardwriter` | processes that do tasks; one shard |
| `shardfolder` | a folder of shards, mapped; `.npy` arrays of others |
| `shards` | windows of them in a seeded order, ready before they are asked for |

    held_out, train = tokenize(TokenizeConfig(out="shards", files=("texts",)))
    loader = ShardLoader(train, rows=8, context=256, rank=rank, ranks=ranks)
"""
