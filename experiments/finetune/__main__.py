"""Fine-tuning: `python -m experiments.finetune`, or the same under `torchrun`."""

from __future__ import annotations

from experiments.cli.main import main
from experiments.finetune.job import JOB

if __name__ == "__main__":
    main(JOB)
