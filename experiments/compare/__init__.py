"""Compare: any runs of the main job and of fine-tuning: one table, one CSV, one picture of their curves."""
