"""Tracking: what a run tells, beside its `metrics.jsonl`, to TensorBoard, Weights & Biases or MLflow.

    tracker.py        what a tracker is
    feed.py           hands it rows on a thread of its own; drops it where it fails
    tensorboards.py   events in the run's folder
    wandbs.py         offline runs in the run's folder
    mlflows.py        runs in a local store

Their libraries are imported when a run starts with them, and never otherwise.
"""
