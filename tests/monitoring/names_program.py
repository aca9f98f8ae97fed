"""Run with the Python of a vLLM environment: print the names of the metrics that its server registers, as JSON."""

import json
from unittest.mock import MagicMock

import prometheus_client
from vllm.config import ObservabilityConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

# Only what the constructor reads; a real configuration would want a model.
config = MagicMock()
config.observability_config = ObservabilityConfig()
config.model_config.max_model_len = 4096
config.model_config.served_model_name = "model"
config.model_config.is_diffusion = False
config.speculative_config.num_speculative_tokens = 3
config.kv_transfer_config = config.ec_transfer_config = config.lora_config = None

PrometheusStatLogger(config, [0])
families = prometheus_client.REGISTRY.collect()
print(json.dumps(sorted({sample.name for family in families for sample in family.samples})))
