"""Model files: mapped readers (GGUF, safetensors), the model catalogue and how models get here."""
