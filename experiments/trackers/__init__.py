"""Trackers: a run's numbers in TensorBoard, Weights & Biases or MLflow, besides its `metrics.jsonl`.

`base`: what a tracker is; `feed`: the thread that hands it the run's rows; `registry`: which there are. Their
libraries are imported when a run starts with them, and never otherwise.
"""
