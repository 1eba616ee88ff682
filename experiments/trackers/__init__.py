"""Trackers: what a run tells, beside its `metrics.jsonl`, to TensorBoard, Weights & Biases or MLflow.

`base`: what a tracker is; `feed` hands it rows on a thread of its own, and drops it where it fails. Their
libraries are imported when a run starts with them, and never otherwise.
"""
