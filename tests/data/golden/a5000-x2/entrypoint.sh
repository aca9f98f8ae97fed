#!/bin/sh
# Rendered by graft from the profile a5000-x2: change that one, this file is written again.
set -eu
if [ -r /run/secrets/api_key ]; then VLLM_API_KEY=$(cat /run/secrets/api_key); export VLLM_API_KEY; fi
if [ "${1:-}" = degraded ]; then
  printf '%s\n' 'graft: exec vllm serve /models/qwen3.6-27b-int4 --host 0.0.0.0 --port 8000 --served-model-name qwen3.6-27b --tensor-parallel-size 2 --disable-custom-all-reduce --max-model-len 131072 --max-num-seqs 1 --max-num-batched-tokens 3168 --gpu-memory-utilization 0.83 --kv-cache-dtype int8_per_token_head --disable-prefix-caching --language-model-only --speculative-config '"'"'{"method":"mtp","num_speculative_tokens":3}'"'"' --compilation-config '"'"'{"cudagraph_mode":"FULL_AND_PIECEWISE","cudagraph_capture_sizes":[1,2,4,8]}'"'"' --async-scheduling --fail-on-environ-validation --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder'
  exec vllm serve /models/qwen3.6-27b-int4 --host 0.0.0.0 --port 8000 \
    --served-model-name qwen3.6-27b \
    --tensor-parallel-size 2 \
    --disable-custom-all-reduce \
    --max-model-len 131072 \
    --max-num-seqs 1 \
    --max-num-batched-tokens 3168 \
    --gpu-memory-utilization 0.83 \
    --kv-cache-dtype int8_per_token_head \
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
printf '%s\n' 'graft: exec vllm serve /models/qwen3.6-27b-int4 --host 0.0.0.0 --port 8000 --served-model-name qwen3.6-27b --tensor-parallel-size 2 --disable-custom-all-reduce --max-model-len 262144 --max-num-seqs 2 --max-num-batched-tokens 4128 --gpu-memory-utilization 0.88 --kv-cache-dtype int8_per_token_head --disable-prefix-caching --language-model-only --speculative-config '"'"'{"method":"mtp","num_speculative_tokens":3}'"'"' --compilation-config '"'"'{"cudagraph_mode":"FULL_AND_PIECEWISE","cudagraph_capture_sizes":[1,2,4,8,16]}'"'"' --async-scheduling --fail-on-environ-validation --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder'
exec vllm serve /models/qwen3.6-27b-int4 --host 0.0.0.0 --port 8000 \
  --served-model-name qwen3.6-27b \
  --tensor-parallel-size 2 \
  --disable-custom-all-reduce \
  --max-model-len 262144 \
  --max-num-seqs 2 \
  --max-num-batched-tokens 4128 \
  --gpu-memory-utilization 0.88 \
  --kv-cache-dtype int8_per_token_head \
  --disable-prefix-caching \
  --language-model-only \
  --speculative-config '{"method":"mtp","num_speculative_tokens":3}' \
  --compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE","cudagraph_capture_sizes":[1,2,4,8,16]}' \
  --async-scheduling \
  --fail-on-environ-validation \
  --reasoning-parser qwen3 \
  --enable-auto-tool-choice \
  --tool-call-parser qwen3_coder