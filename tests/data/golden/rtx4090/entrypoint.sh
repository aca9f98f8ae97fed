#!/bin/sh
# Rendered by graft from the profile rtx4090: change that one, this file is written again.
set -eu
if [ -r /run/secrets/api_key ]; then VLLM_API_KEY=$(cat /run/secrets/api_key); export VLLM_API_KEY; fi
if [ "${1:-}" = degraded ]; then
  printf '%s\n' 'graft: exec vllm serve /models/qwen3.6-27b-int4 --host 0.0.0.0 --port 8000 --served-model-name qwen3.6-27b --max-model-len 14592 --max-num-seqs 1 --max-num-batched-tokens 2112 --gpu-memory-utilization 0.82 --kv-cache-dtype turboquant_k8v4 --disable-prefix-caching --language-model-only --speculative-config '"'"'{"method":"mtp","num_speculative_tokens":3}'"'"' --compilation-config '"'"'{"cudagraph_mode":"FULL_AND_PIECEWISE","cudagraph_capture_sizes":[1,2,4,8]}'"'"' --async-scheduling --fail-on-environ-validation --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder'
  exec vllm serve /models/qwen3.6-27b-int4 --host 0.0.0.0 --port 8000 \
    --served-model-name qwen3.6-27b \
    --max-model-len 14592 \
    --max-num-seqs 1 \
    --max-num-batched-tokens 2112 \
    --gpu-memory-utilization 0.82 \
    --kv-cache-dtype turboquant_k8v4 \
    --disable-prefix-caching \
    --language-model-only \
    --speculative-config '{"method":"mtp","num_speculative_tokens":3}' \
    --compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE","cudagraph_capture_sizes":[1,2,4,8]}' \
    --async-scheduling \
    --fail-on-environ-validation \
    --reasoning-parser qwen3 \
    --enable-auto-tool-choice \
    --tool-call-parser qwen3_coder
fi
printf '%s\n' 'graft: exec vllm serve /models/qwen3.6-27b-int4 --host 0.0.0.0 --port 8000 --served-model-name qwen3.6-27b --max-model-len 29568 --max-num-seqs 1 --max-num-batched-tokens 4128 --gpu-memory-utilization 0.85 --kv-cache-dtype turboquant_k8v4 --disable-prefix-caching --language-model-only --speculative-config '"'"'{"method":"mtp","num_speculative_tokens":3}'"'"' --compilation-config '"'"'{"cudagraph_mode":"FULL_AND_PIECEWISE","cudagraph_capture_sizes":[1,2,4,8]}'"'"' --async-scheduling --fail-on-environ-validation --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder'
exec vllm serve /models/qwen3.6-27b-int4 --host 0.0.0.0 --port 8000 \
  --served-model-name qwen3.6-27b \
  --max-model-len 29568 \
  --max-num-seqs 1 \
  --max-num-batched-tokens 4128 \
  --gpu-memory-utilization 0.85 \
  --kv-cache-dtype turboquant_k8v4 \
  --disable-prefix-caching \
  --language-model-only \
  --speculative-config '{"method":"mtp","num_speculative_tokens":3}' \
  --compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE","cudagraph_capture_sizes":[1,2,4,8]}' \
  --async-scheduling \
  --fail-on-environ-validation \
  --reasoning-parser qwen3 \
  --enable-auto-tool-choice \
  --tool-call-parser qwen3_coder