"""vLLM's routes: control, weights, tokens, Anthropic's messages, OpenAI's Responses API.

As vLLM 0.32 answers them (contracts/real-engines.md 5.1 and 5.2).
"""
