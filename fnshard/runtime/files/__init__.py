"""Files: tensors in safetensors files, and folders that are there whole or not at all."""
