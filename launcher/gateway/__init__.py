"""The launcher's side of the gateway: the edge's configuration, the keys, the compose services."""
