"""What the relay counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from launcher.operate.gateway.engine import Engine


class Meters:
    """The relay's metrics; those of the engine's state are read when they are asked for."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter("graft_relay_requests", "Answers given.", ("route", "status"), registry=self._registry)
        self.refused = Counter(
            "graft_relay_refused", "Refusals of the relay itself.", ("code",), registry=self._registry
        )
        self.broken = Counter(
            "graft_relay_streams_broken", "Streams that ended with an error event.", registry=self._registry
        )
        self.in_flight = Gauge("graft_relay_in_flight", "Requests with the engine.", registry=self._registry)
        self.first_byte = Histogram(
            "graft_relay_first_byte_seconds",
            "From a whole request to the first byte of its answer.",
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
            registry=self._registry,
        )
        self._ready = Gauge("graft_relay_engine_ready", "1 while the engine serves.", registry=self._registry)
        self._open = Gauge("graft_relay_admission_open", "1 while new requests are let in.", registry=self._registry)
        self._closed = Gauge(
            "graft_relay_admission_closed", "1 while this closes admission.", ("by",), registry=self._registry
        )
        self._kv_usage = Gauge("graft_relay_kv_usage", "Share of the KV cache in use.", registry=self._registry)
        self._waiting = Gauge("graft_relay_waiting", "Requests in vLLM's queue.", registry=self._registry)

    def text(self, engine: Engine) -> bytes:
        """Return all of them in Prometheus' text format."""
        self._ready.set(engine.look().is_serving)
        self._open.set(engine.admission.is_open)
        for pressure in ("kv-cache", "queue"):
            self._closed.labels(pressure).set(pressure in engine.admission.closed_by)
        self._kv_usage.set(engine.kv_usage)
        self._waiting.set(engine.waiting)
        return generate_latest(self._registry)
