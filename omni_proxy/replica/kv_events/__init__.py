"""KV events: prefix cache contents, published over ZeroMQ in vLLM's and SGLang's formats."""
