"""The Compose profile `monitoring`: Prometheus, Grafana and a GPU exporter beside the server."""
