"""Who may call the admin API: API keys, browser origins, CORS."""
