"""Box 1: which tokens of which sequences are computed in the next step."""
