"""Data for fine-tuning: JSONL files on one end, equal global batches on any number of ranks on the other.

| module | what |
|---|---|
| `pieces` | stretches of text and whether they are to be learned; token ids of many at once |
| `control` | control tokens that a text spells, and text that stands behind other text |
| `bytelevel`, `tokenizer` | the built-in byte tokenizer, tokenizers from files |
| `rendering`, `template` | chat templates, and what in their text people wrote |
| `lines`, `records` | lines of JSONL, and the samples, pairs and choices they describe |
| `arrays`, `writer`, `prepared` | files tokenised once into a folder all ranks map; all their mistakes |
| `permutation`, `packing` | the order of an epoch, samples to a row |
| `batches`, `loader` | rows as tensors; endless batches and exact resume |
| `builtin` | real examples every machine has: signatures and docstrings of the standard library |

    tokenizer = byte_tokenizer()
    prepared = prepare([train_file], tokenizer, context=256, cache=folder)  # before any rank starts
    loader = PackedLoader(open_prepared(prepared.folder), rows=8, rank=rank, ranks=ranks)
"""
