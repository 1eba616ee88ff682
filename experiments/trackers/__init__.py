"""Trackers: a run's numbers, beside its `metrics.jsonl`, in TensorBoard, Weights & Biases or MLflow.

`base`: what a tracker is; `feed` hands it rows on a thread of its own, and drops it where it fails. Their
libraries are imported when a run starts with them, and never otherwise.
"""
