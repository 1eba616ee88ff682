"""What checkpoints cost, beside plain torch.distributed.checkpoint, and what a step pays for one."""
