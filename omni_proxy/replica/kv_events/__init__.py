"""What the prefix cache holds, published over ZeroMQ in the forms of vLLM and SGLang."""
