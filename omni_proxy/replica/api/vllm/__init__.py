"""vLLM's routes: control, weights, tokens, Anthropic's messages, OpenAI's Responses API.

Responses match those of vLLM 0.32. Source: note:real-engines 5.1, 5.2.
"""
