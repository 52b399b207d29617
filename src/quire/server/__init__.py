"""HTTP: the OpenAI-compatible server. The only room that knows asyncio."""
