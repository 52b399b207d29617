"""The interfaces that others gave to paged attention, over Quire's operators: for who comes from there.

descriptor.py is InfiniOP's paged prefill, decode.py RoseLLM's decode, vllm.py vLLM's first two kernels, flash.py
flash-attn's and transformers' functions. docs/lineage.md says what is the same and what is not.
"""
