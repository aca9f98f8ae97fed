"""Keep a started service serving: keep the engine running, watch its progress, stand in front of it.

Runs inside Graft's image as well as beside a local server: it imports the standard library, what vLLM's own image
carries, and of the launcher only what `launcher.images.operate` packs with it.
"""
