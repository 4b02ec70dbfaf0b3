"""SGLang's routes: generate, server info, load, metrics, health, admin and weight operations."""
