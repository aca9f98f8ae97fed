#!/bin/sh
# Rendered by graft from the profile cpu: change that one, this file is written again.
set -eu
if [ -r /run/secrets/api_key ]; then VLLM_API_KEY=$(cat /run/secrets/api_key); export VLLM_API_KEY; fi
if [ "${1:-}" = degraded ]; then
  printf '%s\n' 'graft: exec vllm serve /models/smollm2-135m-instruct --host 0.0.0.0 --port 8000 --served-model-name smollm2-135m-instruct --dtype float32 --max-model-len 2048 --max-num-seqs 2 --max-num-batched-tokens 1024 --enable-prefix-caching --enforce-eager'
  exec vllm serve /models/smollm2-135m-instruct --host 0.0.0.0 --port 8000 \
    --served-model-name smollm2-135m-instruct \
    --dtype float32 \
    --max-model-len 2048 \
    --max-num-seqs 2 \
    --max-num-batched-tokens 1024 \
    --enable-prefix-caching \
    --enforce-eager
fi
printf '%s\n' 'graft: exec vllm serve /models/smollm2-135m-instruct --host 0.0.0.0 --port 8000 --served-model-name smollm2-135m-instruct --dtype float32 --max-model-len 4096 --max-num-seqs 4 --max-num-batched-tokens 2048 --enable-prefix-caching --enforce-eager'
exec vllm serve /models/smollm2-135m-instruct --host 0.0.0.0 --port 8000 \
  --served-model-name smollm2-135m-instruct \
  --dtype float32 \
  --max-model-len 4096 \
  --max-num-seqs 4 \
  --max-num-batched-tokens 2048 \
  --enable-prefix-caching \
  --enforce-eager