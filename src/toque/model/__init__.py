"""Models: the structure of a checkpoint, where its weights go, how a step runs through them."""
