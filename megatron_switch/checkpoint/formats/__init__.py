"""Files: torch_dist, safetensors, Hugging Face folders, tokenizers, read without a model."""
