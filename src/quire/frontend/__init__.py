"""The front end: prompts become requests, and events become outputs. LLM and AsyncLLM are its two interfaces."""
