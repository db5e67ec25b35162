"""How tokens are sampled: vLLM in a process of its own, its twin weights and its parsers."""
