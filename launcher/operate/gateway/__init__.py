"""The gateway in front of vLLM: HAProxy at the edge, and behind it a relay that knows what vLLM's answers mean.

What runs in the container (the relay) needs the standard library, aiohttp, pydantic and prometheus_client alone, which
vLLM's image carries.
"""
