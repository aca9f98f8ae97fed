"""What the relay is told: one JSON file, rendered with the rest of the service's files."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """The relay's settings; times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: str
    """vLLM's address, such as `http://vllm:8000`."""
    host: str
    port: int
    metrics_port: int | None
    """None: no metrics are served."""
    api_key_file: Path
    """vLLM's own key, which takes the place of the client's."""
    state_dir: Path
    """Folder of the service's status (`launcher.operate.service_state`)."""
    max_request_bytes: int
    max_body_bytes: int
    """Bytes of all request bodies that are held at once."""
    max_in_flight: int
    """Requests that may be with the engine at once, running and waiting."""
    max_waiting: int
    """Requests in vLLM's queue above which no more are let in."""
    body_timeout_s: float = 60.0
    """From the request's headers to its last byte."""
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 600.0
    """Longest silence of the engine: before an answer, and between two pieces of one."""
    poll_interval_s: float = 1.0
    """Between two looks at /health and /metrics."""
    unresponsive_s: float = 30.0
    """An engine that takes connections and answers nothing for so long counts as gone."""
    loading_retry_s: int = 10
    """`Retry-After` while the engine loads and nobody knows how long."""
