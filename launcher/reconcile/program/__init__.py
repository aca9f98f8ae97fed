"""What runs in vLLM's environment: `python -m launcher.reconcile.program REQUEST`; independent of the launcher."""
