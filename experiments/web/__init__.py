"""Web: one page on loopback that starts runs of train and finetune, and shows them."""
