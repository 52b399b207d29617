"""The paged-attention interfaces of other libraries, implemented with Quire's operators.

descriptor.py has InfiniOP's paged prefill, decode.py RoseLLM's decode, vllm.py vLLM's first two kernels, flash.py
flash-attn's and transformers' functions. docs/lineage.md lists the differences.
"""
