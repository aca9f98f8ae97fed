"""The fixes, in the order in which they are applied."""

from vllm_graft.fixes import none_not_null, qwen3_arguments_lost, tq_spec_decode
from vllm_graft.patch import Patch

FIXES: tuple[Patch, ...] = (tq_spec_decode.PATCH, qwen3_arguments_lost.PATCH, none_not_null.PATCH)
