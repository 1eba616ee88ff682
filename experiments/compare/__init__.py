"""Compare: make a table, a CSV and a picture of curves of any runs of training and fine-tuning."""
