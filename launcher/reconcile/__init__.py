"""Two engines on the same tokens, layer by layer: where they part, and what that costs."""
