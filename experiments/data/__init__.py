"""Data: files of text on one end, equal global batches on any number of ranks on the other.

For fine-tuning, samples:

| module | what |
|---|---|
| `pieces` | stretches of text and whether they are to be learned; control tokens; token ids of many at once |
| `bytelevel`, `tokenizer` | the built-in byte tokenizer, tokenizers from files |
| `renderer`, `template` | chat templates run apart, and what in their text people wrote |
| `layouts`, `records` | lines of files, and the samples, pairs and choices they describe |
| `writer`, `prepared` | files tokenised once into a folder all ranks map; all their mistakes |
| `permutation`, `batches`, `loader` | the order of an epoch; samples in rows as tensors; endless batches |
| `builtin` | real examples every machine has: functions of the standard library |

    tokenizer = byte_tokenizer()
    prepared = prepare([train_file], tokenizer, context=256, cache=folder)  # before any rank starts
    loader = PackedLoader(open_prepared(prepared.folder), rows=8, rank=rank, ranks=ranks)

For pre-training, shards of tokens, which `python -m experiments.tokenize` writes:

| module | what |
|---|---|
| `text_files`, `shardwriter` | the files of folders and globs; one shard of them |
| `crew` | processes that do tasks |
| `shardfolder` | a folder of shards, mapped; `.npy` arrays of others |
| `shards` | windows of them in a seeded order, ready before they are asked for |

    held_out, train = tokenize(TokenizeConfig(out="shards", files=("texts",)))
    loader = ShardLoader(train, rows=8, context=256, rank=rank, ranks=ranks)
"""
