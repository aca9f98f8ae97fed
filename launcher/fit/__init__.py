"""What fits before boot: block accounting that is exact, and a fitted estimate of everything else."""
