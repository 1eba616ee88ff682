"""The step: `shard_step` and what it keeps."""
