"""Data: files on one end, equal global batches on any number of ranks on the other.

For fine-tuning, samples:

| module | content |
|---|---|
| `tokenizer`, `chat` | the built-in byte tokenizer and those of model directories; conversations as tokens |
| `rows` | files as rows of `datasets` |
| `fields`, `records` | the names of records' parts; the samples, pairs and prompts that they describe |
| `labelled` | texts and words with classes, and texts that belong together |
| `prepared` | records that are tokenised once into a folder that all ranks map, and all their mistakes |
| `builtin` | real examples that every machine has: functions of the standard library |

    train, = prepare("mine.jsonl", open_directory(model), RecordPolicy("samples", 256), cache=folder)
    loader = Loader(Samples(open_prepared(train.folder)), rows=8, rank=rank, ranks=ranks)

`Samples`, which makes tensors of rows, is in `experiments.tuning.dataset`.

For pre-training, windows of the bytes of `text`, or of `shards` of tokens, which
`python -m experiments.tokenize` writes:

    loader = Loader(Windows(open_shards("shards/train"), context=256), rows=8, rank=rank, ranks=ranks)

`loader` yields batches without end, from any step on any mesh. Each epoch has an order of its own.
"""
