"""Fine-tuning: `python -m experiments.finetune`, or the same under `torchrun`."""

from __future__ import annotations

from experiments.finetune.job import JOB
from experiments.job import main

if __name__ == "__main__":
    main(JOB)
