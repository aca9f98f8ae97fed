"""What runs in vLLM's environment: `python -m launcher.reconcile.program REQUEST`; nothing here imports the launcher."""
