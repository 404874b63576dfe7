"""What a model writes, taken apart: text, reasoning, calls. One push machine per format."""
