"""vLLM's routes: control, weights, tokens, Anthropic's messages, OpenAI's Responses API.

Responses match those of vLLM 0.32 (contracts/real-engines.md 5.1 and 5.2).
"""
