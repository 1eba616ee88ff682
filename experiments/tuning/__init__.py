"""Fine-tuning: Hugging Face models, full, LoRA or QLoRA, by examples or preferences."""
