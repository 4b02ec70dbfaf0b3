"""Who may call the admin API: keys, roles, browsers, CORS, and the audit log of changes."""
