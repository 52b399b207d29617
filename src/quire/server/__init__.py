"""The OpenAI-compatible server. The only package that imports asyncio."""
