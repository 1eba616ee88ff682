"""Tensors in safetensors files, and folders that exist whole or not at all."""
