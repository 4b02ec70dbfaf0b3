"""OpenAI's routes: chat, completions, embeddings, models, transcriptions."""
