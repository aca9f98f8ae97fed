"""How a service is watched and healed: what the plan says about it, and its part of the rendered files."""
