"""The memory that attention to a cached prefix takes, whatever its length: read where there is no torch, too."""

WORKSPACE_BYTES = 62 * 2**20
"""With what flash attention and the call itself allocate, it stays below 64 MiB."""
