"""Compare: it makes one table, one CSV and one picture of curves of any runs of training and fine-tuning."""
